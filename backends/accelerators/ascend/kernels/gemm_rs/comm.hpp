// GEMM+ReduceScatter, communication kernel (vector cores).
//
// Data flow of a rank (its compute kernel: gemm_reduce/compute.hpp):
//   own a @ own b → tiles in the outbox, round by round: one chunk of every owner
//   outbox → inbox of the tile's owner, as soon as a chunk is computed (TPUT or NIC)
//   inbox, and the own part in the outbox → sum in rank order, in float32 → rounded once → out
// Items of work, round by round (the chunk's number): send the chunk of each other owner, then sum
// each tile of the own chunk. Blocks take them in turns, each its own in order.
// No deadlock: sends wait for the own compute kernel (and earlier calls) alone, sums for sends of the same round; the
// first unfinished item in this order can always go on.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/partials.hpp"

namespace mkernel::ascend::gemm_rs {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const gemm_reduce::Args& args)
        : core_(core), args_(args), g_(args.geometry), partials_(core, args) {}

    // False if a wait was aborted or timed out.
    bool run() {
        for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
            for (std::uint32_t step = 1; step < g_.world; ++step) {
                if (mine() && !partials_.send(args_.order[step], chunk)) return false;
            }
            for (std::uint32_t tile = g_.chunk_begin(args_.rank, chunk);
                 tile < g_.chunk_end(args_.rank, chunk); ++tile) {
                if (!mine()) continue;
                if (!partials_.sum(chunk, tile, args_.output(tile))) return false;
                core_.fence();
            }
        }
        return release(core_, args_, g_.world, g_.released(0), g_.finished());
    }

  private:
    // Whether the next item is this block's.
    bool mine() { return item_++ % core_.count() == core_.index(); }

    Core& core_;
    const gemm_reduce::Args& args_;
    const gemm_reduce::Geometry& g_;
    gemm_reduce::Partials<Core> partials_;
    std::uint32_t item_ = 0;
};

MKERNEL_ASCEND_KERNEL(aiv, gemm_rs, comm, Comm, gemm_reduce::Args)

}  // namespace mkernel::ascend::gemm_rs
