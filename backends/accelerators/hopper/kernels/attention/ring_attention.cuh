// One block of ring_attention.hpp: core.cuh's, whose loader goes on with the keys of other ranks
// and waits for their flags. The multipliers need not know: the loader gives them the number of steps of a
// tile.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/loader.cuh"
#include "backends/accelerators/hopper/kernels/attention/ring_attention.hpp"

namespace mkernel::hopper::attention {

template <int kWidth>
struct RingShared {
    CoreShared<kWidth> core;
    std::int32_t arrived[kMaxRanks - 1];  // of each part: behind the last chunk that was waited for
    ptx::Mbarrier written;                // by each group of multipliers: all that it has
};
static_assert(sizeof(RingShared<64>) <= kSharedBytes && sizeof(RingShared<128>) <= kSharedBytes);

// The loader, driven by one thread. kByHead: each head's chunks have flags of their own, and tiles come in the order of heads
// of keys, so that a chunk whose number is lower than that of one that was waited for has been waited for, too, or
// is not needed any more.
template <bool kCausal, bool kByHead, int kWidth>
class RingLoader {
  public:
    __device__ RingLoader(const RingArgs& args, RingShared<kWidth>& shared)
        : args_(args), shared_(shared), loader_(args.core, shared.core) {}

    // Runs the loader. A failed wait ends it after the tile that waited, whose result is wrong.
    __device__ void run() {
        for (int part = 0; part < args_.count; ++part) shared_.arrived[part] = 0;
        for (std::int32_t number = loader_.take(); number >= 0 && going_; number = loader_.take()) {
            const CoreTile tile = core_tile<kCausal>(args_.core, number);
            loader_.queries(number, tile, steps(tile));
            if (args_.ordered && args_.count > 0) {
                load_in_order(tile);
                continue;
            }
            for (int at = tile.last; at >= 0; --at) loader_.own_keys(tile, at);
            for (int part = 0; part < args_.count; ++part) {
                if (!sees(tile, part)) continue;
                for (int row = 0; row < args_.parts[part].keys; row += kCoreKeys) {
                    load(tile, part, row);
                }
            }
        }
        loader_.end();
    }

  private:
    __device__ bool sees(const CoreTile& tile, int part) const {
        return tile.row >= args_.parts[part].first;
    }

    __device__ std::int32_t steps(const CoreTile& tile) const {
        std::int32_t found = tile.last + 1;
        for (int part = 0; part < args_.count; ++part) {
            if (sees(tile, part)) found += args_.parts[part].keys / kCoreKeys;
        }
        return found;
    }

    // Loads the keys that the tile sees from the last position to the first, whichever rank has them. Of a
    // sequence in pieces, one a rank or, if causal, two in a zigzag, the tile's own or the last comes first.
    __device__ void load_in_order(const CoreTile& tile) {
        const int ranks = args_.count + 1, rank = args_.workspace.rank;
        const int steps = args_.core.keys / kCoreKeys / (kCausal ? 2 : 1);  // of a piece
        int piece = ranks - 1;
        if (kCausal) piece = tile.last < steps ? rank : 2 * ranks - 1 - rank;
        for (int last = tile.last % steps; piece >= 0; --piece, last = steps - 1) {
            const bool second = piece >= ranks;
            const int owner = second ? 2 * ranks - 1 - piece : piece;
            const int first = second ? steps : 0;
            int part = 0;
            while (owner != rank && args_.parts[part].source != owner) ++part;
            for (int at = first + last; at >= first; --at) {
                owner == rank ? loader_.own_keys(tile, at) : load(tile, part, at * kCoreKeys);
            }
        }
    }

    __device__ void load(const CoreTile& tile, int part, int row) {
        int first = 0;
        if constexpr (kByHead) {
            first = (tile.batch * args_.core.kv_heads + tile.kv_head) * args_.of_head;
        }
        await(part, first + row / args_.chunk_rows);
        const auto of = [&](int set) {
            return [&, set](unsigned char* to, ptx::Mbarrier* full, int column) {
                ptx::load_box(to, &args_.slots, full, column, row, tile.kv_head, tile.batch, set);
            };
        };
        loader_.keys(of(2 * part), of(2 * part + 1));
    }

    // Waits for the chunk's flag: later loads read what was copied before the flag.
    __device__ void await(int part, int chunk) {
        const int arrived = shared_.arrived[part];
        if (args_.ordered ? chunk + 1 == arrived : chunk < arrived) return;
        shared_.arrived[part] = chunk + 1;
        if (!args_.exchanges || !going_) return;
        const auto source = static_cast<std::uint32_t>(args_.parts[part].source);
        const std::uint32_t flag = source * args_.chunks + chunk;
        const Workspace& workspace = args_.workspace;
        const auto waiter = waiter_of(workspace, args_.limits, transport::Waiter::compute_kernel);
        going_ =
            waiter.until(workspace.flags(workspace.rank)[flag], workspace.control().state.epoch,
                         {flag, source, static_cast<std::uint32_t>(chunk)});
        ptx::fence_async_proxy();
    }

    const RingArgs& args_;
    RingShared<kWidth>& shared_;
    CoreLoader<kWidth> loader_;
    bool going_ = true;
};

template <class Element, bool kCausal, bool kByHead, int kWidth>
__global__ void __launch_bounds__(kBlockThreads, 1)
    ring_attention(const __grid_constant__ RingArgs args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<RingShared<kWidth>*>(memory);
    if (threadIdx.x == 0) {
        shared.written.init(kMultipliers);
        open_core(shared.core);
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx::fewer_registers<40>();
        if (threadIdx.x != 0) return;
        RingLoader<kCausal, kByHead, kWidth>(args, shared).run();
        shared.written.wait(0);
        if (!args.exchanges) return;
        const auto waiter =
            waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
        finish_call(args.workspace, waiter, args.workspace.control().state.epoch);
    } else {
        ptx::more_registers<232>();
        CoreGroup<Element, kCausal, kWidth>(args.core, shared.core).run();
        if (threadIdx.x % kWarpgroup == 0) shared.written.arrive();
    }
}

}  // namespace mkernel::hopper::attention
