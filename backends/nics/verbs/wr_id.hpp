// Work request numbers. An error completion is reliable only in its status and its wr_id, so the wr_id
// encodes where the request belongs:
//
//   bit  63      receive
//   bits 62..43  peer rank
//   bits 42..37  lane
//   bits 36..0   number of the request on its queue pair, modulo 2^37
//
// Far fewer than 2^36 requests are in flight, so the whole number is found from the latest one.
#pragma once

#include <cstdint>

namespace mkernel::nics::verbs {

inline constexpr std::uint32_t kMaxPeers = 1u << 20;
inline constexpr std::uint32_t kMaxLanes = 1u << 6;

constexpr std::uint64_t make_wr_id(bool receive, std::uint32_t peer, std::uint32_t lane,
                                   std::uint64_t number) {
    constexpr std::uint64_t kNumbers = (std::uint64_t{1} << 37) - 1;
    return (std::uint64_t{receive} << 63) | (std::uint64_t{peer} << 43) |
           (std::uint64_t{lane} << 37) | (number & kNumbers);
}
constexpr bool wr_receive(std::uint64_t wr_id) {
    return wr_id >> 63 != 0;
}
constexpr std::uint32_t wr_peer(std::uint64_t wr_id) {
    return static_cast<std::uint32_t>(wr_id >> 43) & (kMaxPeers - 1);
}
constexpr std::uint32_t wr_lane(std::uint64_t wr_id) {
    return static_cast<std::uint32_t>(wr_id >> 37) & (kMaxLanes - 1);
}
// Returns the number, which is at most `latest` and less than 2^37 before it.
constexpr std::uint64_t wr_number(std::uint64_t wr_id, std::uint64_t latest) {
    return latest - ((latest - wr_id) & ((std::uint64_t{1} << 37) - 1));
}

}  // namespace mkernel::nics::verbs
