// Quantisation to e4m3, as backends/contracts/scaled.py has it: a block's scale brings its largest element to the
// largest e4m3 number, a scale of 0 becomes 1, and with an infinity or NaN all elements count as NaN.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace mkernel::cuda {

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

// Divides elements by their block's scale and rounds the quotients, with the bits that those of __fdiv_rn have in e4m3:
// a quotient by the rounded reciprocal is corrected twice by its exact remainder (P. Markstein, IBM Journal of Research
// and Development 34, 1990), without the branch for operands whose remainder would be too small, since scales are
// brought near 1. Quotients too small for e4m3 may differ, and are zeros of the same sign.
class Quantiser {
  public:
    __device__ explicit Quantiser(float scale) {
        factor_ = scale < 0x1p-60f ? 0x1p100f : (scale > 0x1p60f ? 0x1p-60f : 1.0f);
        divisor_ = scale * factor_;
        reciprocal_ = __frcp_rn(divisor_);
        if (isinf(scale)) divisor_ = 0;  // quotients are zeros: no remainder is NaN
    }

    // Returns two quantised elements, the first in the low half.
    __device__ __forceinline__ std::uint16_t two(float low, float high) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890  // software, with the same bits
        return __nv_cvt_float2_to_fp8x2({quotient(low), quotient(high)}, __NV_SATFINITE, __NV_E4M3);
#else
        std::uint16_t both;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(both)
            : "f"(quotient(high)), "f"(quotient(low)));
        return both;
#endif
    }

  private:
    __device__ __forceinline__ float quotient(float element) const {
        const float dividend = element * factor_;
        float found = dividend * reciprocal_;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            found = fmaf(fmaf(-divisor_, found, dividend), reciprocal_, found);
        }
        return copysignf(found, element);  // a remainder of 0 turns -0 into 0
    }

    float factor_;
    float divisor_;
    float reciprocal_;
};

}  // namespace mkernel::cuda
