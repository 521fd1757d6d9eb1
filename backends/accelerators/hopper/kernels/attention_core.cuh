// One block of attention_core.hpp: a persistent kernel, warp-specialised.
//
// A tile is 128 queries of a head. One thread loads its queries and then, 128 at a time, the keys and values that they see, the last
// ones first; two warpgroups have 64 queries each. A warpgroup starts the product of the queries with the next keys before the
// weighted sum of the values before, and finds the largest scores while the latter is under way. The two take turns at
// starting products, so that one's weights, in registers, are found under the other's products.
//
// After: Shah et al., "FlashAttention-3", 2024.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/kernels/attention_group.cuh"

namespace mkernel::hopper::attention {

// One thread.
template <bool kCausal>
__device__ inline void load_core(const CoreArgs& args, CoreShared& shared) {
    Cursor<kCoreQueries> q;
    Cursor<kCoreStages> step;
    const auto load = [](unsigned char* to, const CUtensorMap& map, ptx::Mbarrier& full, int rows,
                         int row, int head, int batch) {
        for (int half = 0; half < 2; ++half) {
            ptx::load_box(to + half * rows * 128, &map, &full, half * 64, row, head, batch);
        }
    };
    while (true) {
        const auto number = static_cast<std::int32_t>(atomicAdd(args.counters, 1U));
        shared.q_empty[q.slot].wait(q.parity ^ 1);
        if (number >= args.tiles) break;
        shared.tile[q.slot] = number;
        const CoreTile tile = core_tile<kCausal>(args, number);
        shared.q_full[q.slot].expect(kTileBytes);
        for (int group = 0; group < kMultipliers; ++group) {
            load(shared.q[q.slot] + group * 2 * kHalfBytes, args.q, shared.q_full[q.slot], 64,
                 tile.row + group * 64, tile.head, tile.batch);
        }
        q.next();
        for (int at = tile.steps - 1; at >= 0; --at) {
            shared.k_empty[step.slot].wait(step.parity ^ 1);
            shared.k_full[step.slot].expect(kStepBytes);
            load(shared.k[step.slot], args.k, shared.k_full[step.slot], kCoreKeys, at * kCoreKeys,
                 tile.kv_head, tile.batch);
            shared.v_empty[step.slot].wait(step.parity ^ 1);
            shared.v_full[step.slot].expect(kStepBytes);
            load(shared.v[step.slot], args.v, shared.v_full[step.slot], kCoreKeys, at * kCoreKeys,
                 tile.kv_head, tile.batch);
            step.next();
        }
    }
    shared.tile[q.slot] = -1;
    shared.q_full[q.slot].arrive();
    // The last block leaves the counters as it found them: all others have taken their last tile.
    __threadfence();
    if (atomicAdd(args.counters + 1, 1U) == gridDim.x - 1) {
        args.counters[0] = 0;
        args.counters[1] = 0;
    }
}

template <class Element, bool kCausal>
__global__ void __launch_bounds__(kBlockThreads, 1)
    attention_core(const __grid_constant__ CoreArgs args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<CoreShared*>(memory);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kCoreQueries; ++slot) {
            shared.q_full[slot].init(1);
            shared.q_empty[slot].init(kMultipliers);
        }
        for (int slot = 0; slot < kCoreStages; ++slot) {
            shared.k_full[slot].init(1);
            shared.v_full[slot].init(1);
            shared.k_empty[slot].init(kMultipliers * kWarpgroup / kWarp);
            shared.v_empty[slot].init(kMultipliers * kWarpgroup / kWarp);
        }
        ptx::publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx::fewer_registers<24>();
        if (threadIdx.x == 0) load_core<kCausal>(args, shared);
    } else {
        ptx::more_registers<240>();
        CoreGroup<Element, kCausal>(args, shared).run();
    }
}

}  // namespace mkernel::hopper::attention
