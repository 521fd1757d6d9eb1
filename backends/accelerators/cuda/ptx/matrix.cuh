// 8x8 blocks of 16-bit elements between registers and shared memory, four at a time, in the layout of
// wgmma's accumulators; and rounding to the element type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"

namespace mkernel::cuda::ptx {

// Stores four blocks. Lane l names the row l%8 of block l/8.
__device__ inline void store_blocks(std::uint32_t row, const std::uint32_t (&blocks)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
}

__device__ inline void load_blocks(std::uint32_t (&blocks)[4], std::uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
                 : "r"(row)
                 : "memory");
}

// Returns two floats, rounded to nearest even, the first in the low half.
template <class Element>
__device__ inline std::uint32_t pack(float low, float high) {
    std::uint32_t both;
    if constexpr (std::is_same_v<Element, __half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    }
    return both;
}

template <class Element>
__device__ inline float2 unpack(std::uint32_t both) {
    if constexpr (std::is_same_v<Element, __half>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&both));
    } else {
        return {__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u)};
    }
}

}  // namespace mkernel::cuda::ptx
