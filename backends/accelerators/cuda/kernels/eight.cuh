// 8 elements of 16 bits as one thread adds them up: 16 bytes in memory, floats in registers.
#pragma once

#include "backends/accelerators/cuda/ptx/matrix.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda {

template <class Element>
__device__ __forceinline__ void add_eight(float (&sum)[8], uint4 words) {
    const std::uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = ptx::unpack<Element>(four[i]);
        sum[2 * i] += two.x;
        sum[2 * i + 1] += two.y;
    }
}

template <class Element>
__device__ __forceinline__ uint4 round_eight(const float (&sum)[8]) {
    return {ptx::pack<Element>(sum[0], sum[1]), ptx::pack<Element>(sum[2], sum[3]),
            ptx::pack<Element>(sum[4], sum[5]), ptx::pack<Element>(sum[6], sum[7])};
}

}  // namespace mkernel::cuda
