// Elements of sums: widened to float, rounded to 16 bits, and 8 of them as a thread loads them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda::collectives {

__device__ inline float widen(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ inline float widen(__half x) {
    return __half2float(x);
}
__device__ inline float widen(float x) {
    return x;
}
__device__ inline void narrow(float x, __nv_bfloat16& to) {
    to = __float2bfloat16_rn(x);
}
__device__ inline void narrow(float x, __half& to) {
    to = __float2half_rn(x);
}

// 8 elements of a source, as they are loaded.
template <class In>
struct Eight {
    static constexpr int kVectors = 8 * sizeof(In) / 16;
    uint4 v[kVectors];

    __device__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) v[i] = ptx::load_16(from + i * 16);
    }
};

}  // namespace mkernel::cuda::collectives
