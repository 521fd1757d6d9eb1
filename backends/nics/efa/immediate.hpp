// The 32-bit immediate of a put-with-signal on SRD. A put of one message, which is nearly all:
//
//   bit  31      0
//   bits 30..23  value to add, 1..255
//   bits 22..0   signal index, 0..8388607
//
// A larger put is a group of messages, each of which says what it is; nothing is raised until all
// have come, in whatever order:
//
//   bit  31      1
//   bits 30..29  part (one for each data message; says how many there are), signal, or value
//   bits 28..23  group, counted modulo 64 by the sender for this peer
//   bits 22..0   number of parts, signal index, or value
//
// A group's number is used again only once every message of its last use is complete at the sender:
// its immediates are then in the receiver's completion queue, ahead of those of the new use.
#pragma once

#include <cstdint>

namespace mkernel::nics::efa {

inline constexpr std::uint32_t kMaxSignal = (1u << 23) - 1;
inline constexpr std::uint32_t kMaxValue = 255;
inline constexpr std::uint32_t kMaxParts = kMaxSignal;
inline constexpr std::uint32_t kGroups = 64;

enum class Kind : std::uint32_t { part = 0, signal = 1, value = 2 };

constexpr std::uint32_t pack_whole(std::uint32_t signal, std::uint32_t value) {
    return (value << 23) | signal;
}
constexpr std::uint32_t pack_group(Kind kind, std::uint32_t group, std::uint32_t payload) {
    return (1u << 31) | (static_cast<std::uint32_t>(kind) << 29) | (group << 23) | payload;
}
constexpr bool is_group(std::uint32_t immediate) {
    return immediate >> 31 != 0;
}
constexpr Kind kind_of(std::uint32_t immediate) {
    return static_cast<Kind>((immediate >> 29) & 3);
}
constexpr std::uint32_t group_of(std::uint32_t immediate) {
    return (immediate >> 23) & (kGroups - 1);
}
constexpr std::uint32_t value_of(std::uint32_t immediate) {
    return immediate >> 23;
}
constexpr std::uint32_t payload_of(std::uint32_t immediate) {
    return immediate & kMaxSignal;
}

}  // namespace mkernel::nics::efa
