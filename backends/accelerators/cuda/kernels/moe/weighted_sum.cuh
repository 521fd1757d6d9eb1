// Weighted sums of a token's results, 8 elements a thread at a time.
#pragma once

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/collectives/elements.cuh"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"

namespace mkernel::cuda::moe {

using collectives::Eight;
using collectives::narrow;
using collectives::widen;

// Eight sums of one thread.
struct Sums {
    float of[8] = {};

    template <class In>
    __device__ void add(float weight, const Eight<In>& found) {
        const In* elements = reinterpret_cast<const In*>(found.v);
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] += weight * widen(elements[i]);
    }
    __device__ void add(const Sums& more) {
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] += more.of[i];
    }
    template <class In>
    __device__ void add(float weight, const char* from) {
        Eight<In> found;
        found.load(from);
        add(weight, found);
    }
    template <class Out>
    __device__ void store(char* to) const {
        if constexpr (sizeof(Out) == 4) {
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                *reinterpret_cast<float4*>(to + i * 4) = {of[i], of[i + 1], of[i + 2], of[i + 3]};
            }
        } else {
            uint4 rounded;
            Out* elements = reinterpret_cast<Out*>(&rounded);
#pragma unroll
            for (int i = 0; i < 8; ++i) narrow(of[i], elements[i]);
            *reinterpret_cast<uint4*>(to) = rounded;
        }
    }
};

}  // namespace mkernel::cuda::moe
