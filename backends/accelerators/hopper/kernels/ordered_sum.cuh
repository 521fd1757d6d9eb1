// Sums of 16-bit floats of several ranks in a fixed order: float32, rounded once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/accelerators/hopper/kernels/exchange.cuh"

namespace mkernel::hopper::collectives {

__device__ inline float widen(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ inline float widen(__half x) {
    return __half2float(x);
}
__device__ inline void narrow(float x, __nv_bfloat16& to) {
    to = __float2bfloat16_rn(x);
}
__device__ inline void narrow(float x, __half& to) {
    to = __float2half_rn(x);
}

// One thread's 8 elements.
template <class T>
class Sum8 {
  public:
    __device__ void start(uint4 with) {
        const T* elements = reinterpret_cast<const T*>(&with);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum_[i] = widen(elements[i]);
    }
    __device__ void add(uint4 more) {
        const T* elements = reinterpret_cast<const T*>(&more);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum_[i] += widen(elements[i]);
    }
    __device__ uint4 rounded() const {
        uint4 result;
        T* elements = reinterpret_cast<T*>(&result);
#pragma unroll
        for (int i = 0; i < 8; ++i) narrow(sum_[i], elements[i]);
        return result;
    }

  private:
    float sum_[8];
};

// The block stores at dst[i], i < count, the sum of `nbytes` of src[0], src[1], ..., src[world - 1],
// in that order. `aligned`: all those addresses are multiples of 16.
template <class T>
__device__ void sum_to_each(const Lanes& lanes, int world, std::uint32_t nbytes, int count,
                            bool aligned) {
    constexpr int kBatch = 4;
    const std::uint32_t whole = aligned ? nbytes / 16 * 16 : 0;
    for (std::uint32_t at = threadIdx.x * 16; at < whole; at += kThreads * 16) {
        Sum8<T> sum;
        for (int step = 0; step < world; step += kBatch) {
            uint4 v[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i < world) v[i] = ptx::load_16(lanes.src[step + i] + at);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i == 0) {
                    sum.start(v[0]);
                } else if (step + i < world) {
                    sum.add(v[i]);
                }
            }
        }
        const uint4 rounded = sum.rounded();
        for (int i = 0; i < count; ++i) ptx::store_16(lanes.dst[i] + at, rounded);
    }
    for (std::uint32_t at = whole + threadIdx.x * sizeof(T); at < nbytes;
         at += kThreads * sizeof(T)) {
        float sum = widen(*reinterpret_cast<const T*>(lanes.src[0] + at));
        for (int step = 1; step < world; ++step) {
            sum += widen(*reinterpret_cast<const T*>(lanes.src[step] + at));
        }
        T rounded;
        narrow(sum, rounded);
        for (int i = 0; i < count; ++i) *reinterpret_cast<T*>(lanes.dst[i] + at) = rounded;
    }
}

}  // namespace mkernel::hopper::collectives
