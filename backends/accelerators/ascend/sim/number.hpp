// Conversions between float32 and the 16-bit dtypes, element by element, as the units of a core do
// them: widening is exact, narrowing rounds to nearest even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backends/accelerators/ascend/isa/tile.hpp"

#define MKERNEL_INLINE [[gnu::always_inline]] inline

namespace mkernel::ascend::sim {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

MKERNEL_INLINE float widen(const std::byte* at, isa::DType dtype) {
    if (dtype == isa::DType::float32) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, at, 2);
    if (dtype == isa::DType::bfloat16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
    Half half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}

MKERNEL_INLINE std::uint16_t to_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// `count` contiguous elements.
MKERNEL_INLINE void narrow_run(std::byte* to, isa::DType dtype, const float* from,
                               std::uint32_t count) {
    if (dtype == isa::DType::float32) {
        std::memcpy(to, from, std::size_t{count} * 4);
    } else if (dtype == isa::DType::float16) {
        auto* half = reinterpret_cast<Half*>(to);
        for (std::uint32_t i = 0; i < count; ++i) half[i] = static_cast<Half>(from[i]);
    } else {
        auto* half = reinterpret_cast<std::uint16_t*>(to);
        for (std::uint32_t i = 0; i < count; ++i) half[i] = to_bfloat16(from[i]);
    }
}

MKERNEL_INLINE void widen_run(float* to, const std::byte* from, isa::DType dtype,
                              std::uint32_t count) {
    const std::uint32_t size = isa::bytes_of(dtype);
    for (std::uint32_t i = 0; i < count; ++i) to[i] = widen(from + i * size, dtype);
}

}  // namespace mkernel::ascend::sim
