// The order in which a compute kernel works on what the ranks of a world send: a numbering of
// `bands` equal parts of each source, each of `width` places.
//
// The own part comes first, then those of same-node ranks, then those of other nodes. Ranks of one
// group send at the same time and share the way in, so what they send arrives at the same pace: it
// is consumed band by band, within a band rank by rank. Taking one whole source after the other
// would leave the last ones' work to the end.
#pragma once

#include <cstdint>

#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend {

class Consumption {
  public:
    struct Place {
        std::uint32_t source = 0, band = 0, place = 0;
    };

    Consumption(const CallArgs& call, std::uint32_t world, std::uint32_t bands, std::uint32_t width)
        : width_(width), per_source_(bands * width) {
        for (std::uint32_t i = 0; i < world; ++i) {
            const std::uint32_t source = call.order[i];
            Group& group = groups_[source == call.rank ? 0 : call.same_node(source) ? 1 : 2];
            group.sources[group.count++] = source;
        }
    }

    [[nodiscard]] std::uint32_t size() const {
        return per_source_ * (groups_[0].count + groups_[1].count + groups_[2].count);
    }

    [[nodiscard]] Place operator[](std::uint32_t index) const {
        const Group* group = groups_;
        while (index >= group->count * per_source_) {
            index -= group->count * per_source_;
            ++group;
        }
        const std::uint32_t band = group->count * width_;  // of every source
        const std::uint32_t within = index % band;
        return {group->sources[within / width_], index / band, within % width_};
    }

  private:
    struct Group {
        std::uint32_t sources[kMaxWorld] = {};
        std::uint32_t count = 0;
    };
    std::uint32_t width_, per_source_;
    Group groups_[3];
};

}  // namespace mkernel::ascend
