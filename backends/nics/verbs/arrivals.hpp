// Groups of messages from one peer, put together again: which immediates of a group have come, over
// which lane (queue pair), in whatever order.
//
// Every group has a *share* on every lane: messages with an immediate, each part of which carries their
// number. Lane by lane the 6 bits of a group's number are enough to know the group: the sender uses a number
// again only when its last use is complete, so an immediate on a lane is always within 64 groups of the
// oldest whose share there is incomplete. Between lanes there is no such bound. They complete on different
// completion queues, so one may lag; its posted receives bound how far the others may be ahead.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backends/nics/verbs/immediate.hpp"

namespace mkernel::nics::verbs {

class Arrivals {
  public:
    enum class Outcome {
        pending,   // something of the group is still on its way
        complete,  // that was the last of it
        broken,    // no sender that keeps the rules sends this
    };
    struct Signal {
        std::uint32_t signal = 0;
        std::uint32_t value = 0;
    };

    // `receives`: the number that a lane may have used without our having seen it.
    Arrivals(std::uint32_t lanes, std::uint32_t receives);

    // Takes an immediate of a group, in the order of the lane's completion queue. `signal`: the signal to
    // raise where the group is complete.
    Outcome take(std::uint32_t lane, std::uint32_t immediate, Signal& signal);

  private:
    struct Share {
        std::uint32_t messages = 0;  // 0: not known yet
        std::uint32_t seen = 0;
    };
    struct Lane {
        std::uint64_t oldest = 0;    // group whose share is not complete
        std::uint64_t finished = 0;  // bit i: the share of the group that is i modulo 64 is
        std::array<Share, kGroups> shares{};
    };
    struct Group {
        std::uint64_t number = UINT64_MAX;
        std::uint32_t shares_left = 0;
        Signal signal;
    };

    std::vector<Lane> lanes_;
    std::vector<Group> groups_;  // by number, modulo the size, a power of two
};

}  // namespace mkernel::nics::verbs
