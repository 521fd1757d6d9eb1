// The one thread that brings a block of core.cuh its tiles: queries, then keys and values step by
// step.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/group.cuh"

namespace mkernel::hopper::attention {

template <int kWidth>
class CoreLoader {
  public:
    __device__ CoreLoader(const CoreArgs& args, CoreShared<kWidth>& shared)
        : args_(args), shared_(shared) {}

    // Returns the number of the next tile, once there is room for its queries; negative: there is none.
    __device__ std::int32_t take() {
        const auto number = static_cast<std::int32_t>(atomicAdd(args_.counters, 1U));
        shared_.q_empty[q_.slot].wait(q_.parity ^ 1);
        return number < args_.tiles ? number : -1;
    }

    // Loads the tile's queries, which see so many steps of keys.
    __device__ void queries(std::int32_t number, const CoreTile& tile, std::int32_t steps) {
        shared_.tile[q_.slot] = number;
        shared_.steps[q_.slot] = steps;
        ptx::Mbarrier& full = shared_.q_full[q_.slot];
        full.expect(CoreShared<kWidth>::kTileBytes);
        for (int box = 0; box < kBoxes * kMultipliers; ++box) {
            ptx::load_box(shared_.q[q_.slot] + box * kBoxBytes, &args_.q, &full,
                          box % kBoxes * kBoxColumns, tile.row + box / kBoxes * 64, tile.head,
                          tile.batch);
        }
        q_.next();
    }

    // Loads the next step: `key` and `value`(to, full, column) each load kBoxColumns of kCoreKeys rows.
    template <class Key, class Value>
    __device__ void keys(Key&& key, Value&& value) {
        const auto load = [&](unsigned char* to, ptx::Mbarrier& full, ptx::Mbarrier& empty,
                              auto&& load_columns) {
            empty.wait(step_.parity ^ 1);
            full.expect(CoreShared<kWidth>::kStepBytes);
            for (int box = 0; box < kBoxes; ++box) {
                load_columns(to + box * kCoreKeys * 128, &full, box * kBoxColumns);
            }
        };
        const int slot = step_.slot;
        load(shared_.k[slot], shared_.k_full[slot], shared_.k_empty[slot], key);
        load(shared_.v[slot], shared_.v_full[slot], shared_.v_empty[slot], value);
        step_.next();
    }

    // Loads step `at` of the keys that args has.
    __device__ void own_keys(const CoreTile& tile, int at) {
        const auto of = [&](const CUtensorMap* map) {
            return [&, map](unsigned char* to, ptx::Mbarrier* full, int column) {
                ptx::load_box(to, map, full, column, at * kCoreKeys, tile.kv_head, tile.batch);
            };
        };
        keys(of(&args_.k), of(&args_.v));
    }

    // Ends the loader, after `take` has found no tile, or with a tile that is not wanted. The last block
    // leaves the counters as it found them: all others have taken their last tile.
    __device__ void end() {
        shared_.tile[q_.slot] = -1;
        shared_.q_full[q_.slot].arrive();
        __threadfence();
        if (atomicAdd(args_.counters + 1, 1U) != gridDim.x - 1) return;
        args_.counters[0] = 0;
        args_.counters[1] = 0;
    }

  private:
    static constexpr int kBoxes = kWidth / kBoxColumns;

    const CoreArgs& args_;
    CoreShared<kWidth>& shared_;
    Cursor<kCoreQueries> q_;
    Cursor<CoreShared<kWidth>::kStages> step_;
};

// Called by one thread of a block, before a barrier of it.
template <int kWidth>
__device__ inline void open_core(CoreShared<kWidth>& shared) {
    for (int slot = 0; slot < kCoreQueries; ++slot) {
        shared.q_full[slot].init(1);
        shared.q_empty[slot].init(kMultipliers);
    }
    for (int slot = 0; slot < CoreShared<kWidth>::kStages; ++slot) {
        shared.k_full[slot].init(1);
        shared.v_full[slot].init(1);
        shared.k_empty[slot].init(kMultipliers * kWarpgroup / kWarp);
        shared.v_empty[slot].init(kMultipliers * kWarpgroup / kWarp);
    }
    ptx::publish_barriers();
}

}  // namespace mkernel::hopper::attention
