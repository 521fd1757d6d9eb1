// GEMM+ReduceScatter and GEMM+AllReduce, communication kernel (vector cores). Tile by tile, without a
// global barrier.
//
// Data flow of a rank (its compute kernel: compute.hpp):
//   own a @ own b → tiles in the outbox, round by round: one chunk of every owner
//   outbox → inbox of the tile's owner, as soon as a chunk is computed (TPUT or NIC)
//   inbox, and the own part in the outbox → sum in rank order, in float32 → rounded once → out
// AllReduce (`replicated`) goes on:
//   out → inbox of every same-node rank (TPUT); outbox → those of other nodes (NIC)
//   inbox, as each tile comes → out
// Items of work, round by round (the chunk's number): send the chunk of each other owner; sum (and
// push on) each tile of the own chunk; AllReduce: take in the tiles of the others' previous chunk.
// Blocks take them in turns, each its own in order.
// There is no deadlock: a send waits for the own compute kernel (and earlier calls) alone, a sum for
// sends of the same round, taking in for sums of the round before. So the first unfinished item can
// always go on.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/partials.hpp"

namespace mkernel::ascend::gemm_reduce {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), partials_(core, args) {
        for (std::uint32_t other = 0; other < g_.world; ++other) {
            stages_ = stages_ || (g_.replicated && !args_.same_node(other));
        }
    }

    // False if a wait was aborted or timed out.
    bool run() {
        for (std::uint32_t round = 0; round <= g_.chunks(); ++round) {
            if (round < g_.chunks() && !(send(round) && sum(round))) return false;
            if (g_.replicated && round > 0 && !take_in(round - 1)) return false;
        }
        return release(core_, args_, g_.world, g_.finished());
    }

  private:
    bool send(std::uint32_t chunk) {
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t owner = args_.order[step];
            if (g_.chunk_tiles(owner, chunk) == 0) continue;
            if (mine() && !partials_.send(owner, chunk)) return false;
        }
        return true;
    }

    bool sum(std::uint32_t chunk) {
        for (std::uint32_t tile = g_.chunk_begin(args_.rank, chunk);
             tile < g_.chunk_end(args_.rank, chunk); ++tile) {
            if (!mine()) continue;
            const isa::GlobalView staged = stages_ ? args_.own_result(tile) : isa::GlobalView{};
            if (!partials_.sum(chunk, tile, args_.output(tile), staged)) return false;
            core_.fence();
            if (g_.replicated && !push(tile)) return false;
        }
        return true;
    }

    // The own tile, which is in the output (and in the outbox), to every other rank.
    bool push(std::uint32_t tile) {
        const std::uint64_t from = g_.own_result_offset(args_.rank, tile),
                            to = g_.result_offset(tile), bytes = g_.result_offset(tile + 1) - to;
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t rank = args_.order[step];
            if (args_.same_node(rank)) {
                partials_.copy(rank, args_.result(args_.peers[rank].inbox, tile),
                               args_.output(tile));
                core_.fence();
            }
            if (!announce(core_, args_, rank, g_.summed(tile), {from, to, bytes})) return false;
        }
        return true;
    }

    bool take_in(std::uint32_t chunk) {
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t owner = args_.order[step];
            for (std::uint32_t tile = g_.chunk_begin(owner, chunk);
                 tile < g_.chunk_end(owner, chunk); ++tile) {
                if (!mine()) continue;
                core_.annotate(chunk);
                if (!core_.twait(args_.word(g_.summed(tile)), 1, owner)) return false;
                partials_.copy(args_.rank, args_.output(tile), args_.result(args_.inbox, tile));
            }
        }
        core_.fence();
        return true;
    }

    // Whether the next item is this block's.
    bool mine() { return item_++ % core_.count() == core_.index(); }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Partials<Core> partials_;
    bool stages_ = false;  // results for other nodes lie in the outbox too
    std::uint32_t item_ = 0;
};

MKERNEL_ASCEND_KERNEL(aiv, gemm_reduce, comm, Comm, Args)

}  // namespace mkernel::ascend::gemm_reduce
