// Which output tile comes when, in the compute kernel: a numbering of all output tiles of a rank.
//
// The own rows come first, then those of same-node ranks, then those of other nodes. Ranks of one
// group send at the same time and share the way in, so their rows arrive at the same pace: they are
// consumed row group by row group, within a row group rank by rank in `source_order`. Taking one
// whole source after the other would leave the last ones' work to the end.
#pragma once

#include <cstdint>

#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"

namespace mkernel::ascend::ag_gemm {

struct OutputTile {
    std::uint32_t source = 0, row_group = 0, n_tile = 0;
};

class Consumption {
  public:
    explicit Consumption(const Args& args)
        : n_tiles_(args.geometry.n_tiles()), per_source_(args.geometry.row_groups() * n_tiles_) {
        for (std::uint32_t i = 0; i < args.geometry.world; ++i) {
            const std::uint32_t source = args.source_order[i];
            Group& group = groups_[source == args.rank ? 0 : args.same_node(source) ? 1 : 2];
            group.sources[group.count++] = source;
        }
    }

    [[nodiscard]] std::uint32_t size() const {
        return per_source_ * (groups_[0].count + groups_[1].count + groups_[2].count);
    }

    [[nodiscard]] OutputTile operator[](std::uint32_t index) const {
        const Group* group = groups_;
        while (index >= group->count * per_source_) {
            index -= group->count * per_source_;
            ++group;
        }
        const std::uint32_t band = group->count * n_tiles_;  // one row group of every source
        const std::uint32_t within = index % band;
        return {group->sources[within / n_tiles_], index / band, within % n_tiles_};
    }

  private:
    struct Group {
        std::uint32_t sources[kMaxWorld] = {};
        std::uint32_t count = 0;
    };
    std::uint32_t n_tiles_, per_source_;
    Group groups_[3];
};

}  // namespace mkernel::ascend::ag_gemm
