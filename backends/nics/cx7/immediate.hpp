// The 32-bit immediate of a put-with-signal on RC:
//
//   bits 31..24  value to add, 1..255
//   bits 23..0   signal index, 0..16777215
//
// A larger value goes out as several immediates, the later ones on empty writes: RC executes one
// QP's writes in order, so the data is there before the first of them. kMaxValue bounds how many.
#pragma once

#include <cstdint>

namespace mkernel::nics::cx7 {

inline constexpr std::uint32_t kMaxSignal = (1u << 24) - 1;
inline constexpr std::uint32_t kMaxStep = 255;
inline constexpr std::uint32_t kMaxValue = 16 * kMaxStep;

constexpr std::uint32_t pack_immediate(std::uint32_t signal, std::uint32_t step) {
    return (step << 24) | (signal & kMaxSignal);
}
constexpr std::uint32_t immediate_signal(std::uint32_t immediate) {
    return immediate & kMaxSignal;
}
constexpr std::uint32_t immediate_step(std::uint32_t immediate) {
    return immediate >> 24;
}

}  // namespace mkernel::nics::cx7
