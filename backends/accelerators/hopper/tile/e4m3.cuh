// Quantisation to e4m3, as backends/contracts/scaled.py has it: a block's scale brings its largest element to the
// largest e4m3 number, a scale of 0 becomes 1, and with an infinity or NaN all elements count as NaN.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace mkernel::hopper {

inline constexpr int kScaledBlock = 128;  // elements of a row that have one scale

// Returns the bits of |value|; in the order of such bits NaN is the largest.
__device__ __forceinline__ unsigned size_bits(float value) {
    return __float_as_uint(fabsf(value));
}

// Returns the scale of a block whose largest element has these bits.
__device__ __forceinline__ float e4m3_scale(unsigned most) {
    const float scale = __fdiv_rn(__uint_as_float(most), 448.0f);
    return scale == 0 ? 1.0f : scale;
}

// Returns two quantised elements, the first in the low half.
__device__ __forceinline__ std::uint16_t quantise_two(float low, float high, float scale) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890  // software, with the same bits
    return __nv_cvt_float2_to_fp8x2({__fdiv_rn(low, scale), __fdiv_rn(high, scale)}, __NV_SATFINITE,
                                    __NV_E4M3);
#else
    std::uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(both)
        : "f"(__fdiv_rn(high, scale)), "f"(__fdiv_rn(low, scale)));
    return both;
#endif
}

}  // namespace mkernel::hopper
