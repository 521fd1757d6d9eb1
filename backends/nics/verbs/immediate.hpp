// The 32-bit immediate of a put-with-signal. The form of a put whose last message carries everything, which
// is nearly every one:
//
//   bit  31      0
//   bits 30..23  value to add, 1..255
//   bits 22..0   signal index, 0..8388607
//
// A put that is spread over queue pairs, or cut into messages that may overtake each other, or adds
// more than 255, is a *group*: nothing is raised until all of it has come (arrivals.hpp), and each message
// states what it is:
//
//   bit  31      1
//   bits 30..29  part (of the data; the number of messages with an immediate that its queue pair brings),
//                signal, or value
//   bits 28..23  group, counted modulo 64 by the sender for this peer
//   bits 22..0   number of messages, signal index, or value
//
// A group's number is used again only once every request of its last use is complete at the sender:
// its immediates are then in the receiver's completion queues, each ahead of those that its own
// queue pair brings of the new use. So 64 groups may be in flight, and any number of other puts.
#pragma once

#include <cstdint>

namespace mkernel::nics::verbs {

inline constexpr std::uint32_t kMaxSignal = (1u << 23) - 1;
inline constexpr std::uint32_t kMaxValue = (1u << 23) - 1;
inline constexpr std::uint32_t kMaxWholeValue = 255;  // without a group
inline constexpr std::uint32_t kMaxMessages = kMaxSignal;
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

}  // namespace mkernel::nics::verbs
