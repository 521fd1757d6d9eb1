#include "backends/nics/verbs/arrivals.hpp"

#include <bit>

namespace mkernel::nics::verbs {

Arrivals::Arrivals(std::uint32_t lanes, std::uint32_t receives)
    : lanes_(lanes), groups_(std::bit_ceil(kGroups + (lanes > 1 ? receives + kGroups : 0))) {}

Arrivals::Outcome Arrivals::take(std::uint32_t index, std::uint32_t immediate, Signal& signal) {
    Lane& lane = lanes_[index];
    const std::uint32_t id = group_of(immediate);
    const std::uint64_t bit = std::uint64_t{1} << id;
    if ((lane.finished & bit) != 0) return Outcome::broken;
    const std::uint64_t number = lane.oldest + ((id - lane.oldest) & (kGroups - 1));
    Group& group = groups_[number & (groups_.size() - 1)];
    if (group.number != number) {
        if (group.shares_left != 0) return Outcome::broken;
        group = {number, static_cast<std::uint32_t>(lanes_.size()), {}};
    }
    Share& share = lane.shares[id];
    const std::uint32_t payload = payload_of(immediate);
    switch (kind_of(immediate)) {
        case Kind::part:
            if (share.messages != 0 && share.messages != payload) return Outcome::broken;
            share.messages = payload;
            break;
        case Kind::signal:
            group.signal.signal = payload;
            break;
        case Kind::value:
            group.signal.value = payload;
            break;
        default:
            return Outcome::broken;
    }
    ++share.seen;
    if (share.messages == 0 || share.seen < share.messages) return Outcome::pending;
    if (share.seen > share.messages) return Outcome::broken;
    share = {};
    lane.finished |= bit;
    while (lane.finished >> (lane.oldest & (kGroups - 1)) & 1) {
        lane.finished &= ~(std::uint64_t{1} << (lane.oldest & (kGroups - 1)));
        ++lane.oldest;
    }
    if (--group.shares_left != 0) return Outcome::pending;
    signal = group.signal;
    return Outcome::complete;
}

}  // namespace mkernel::nics::verbs
