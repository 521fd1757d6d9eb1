// GEMM+ReduceScatter and GEMM+AllReduce, communication kernel (vector cores). Tile by tile, without a
// global barrier.
//
// Data flow of a rank (its compute kernel: compute.hpp):
//   own a @ own b → tiles in the outbox, round by round: one chunk of every owner
//   outbox → inbox of the tile's owner, as soon as a chunk is computed (TPUT or NIC)
//   inbox, and the own part in the outbox → sum in rank order, in float32 → rounded once → out
// Invariant sums: leaves in the scratch → their root → outbox, and the own ones → the sum
// AllReduce (`replicated`) goes on:
//   the same sum → own inbox; each rank of the node is notified, and gets it from there (TGET) → its out
//   the same sum → outbox → inbox of ranks of other nodes (NIC) → their out
// Items of work, round by round: send a chunk to each other owner; sum each tile of the own chunk
// before; AllReduce: gather each other owner's chunk before that. Blocks take them in turns, each its
// own in order. So an item seldom holds up the next ones of its block for long.
// There is no deadlock: a send waits for the own compute kernel (and earlier calls) alone, a sum for
// sends of a round before, gathering for sums of a round before. So the first unfinished item can
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
            if (!g_.replicated || other == args_.rank) continue;
            (args_.same_node(other) ? shows_ : stages_) = true;
        }
    }

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        const std::uint32_t chunks = g_.chunks();
        for (std::uint32_t round = 0; round < chunks + 2; ++round) {
            if (round < chunks && !send(round)) return false;
            if (round >= 1 && round <= chunks && !sum(round - 1)) return false;
            if (g_.replicated && round >= 2 && !gather(round - 2)) return false;
        }
        return g_.world == 1 || release(core_, args_, g_.world, g_.finished());
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
            const isa::GlobalView none{};
            const isa::GlobalView copies[2] = {shows_ ? args_.result(args_.inbox, tile) : none,
                                               stages_ ? args_.own_result(tile) : none};
            if (!partials_.sum(chunk, tile, args_.output(tile), copies)) return false;
            if (g_.replicated && !tell(tile)) return false;
        }
        return true;
    }

    // Notifies every other rank of the own tile, which is sent to those of other nodes.
    bool tell(std::uint32_t tile) {
        const std::uint64_t from = g_.own_result_offset(args_.rank, tile),
                            to = g_.result_offset(tile), bytes = g_.result_offset(tile + 1) - to;
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            if (!announce(core_, args_, args_.order[step], g_.summed(tile), {from, to, bytes})) {
                return false;
            }
        }
        return true;
    }

    // Gathers finished tiles straight into the output.
    bool gather(std::uint32_t chunk) {
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t owner = args_.order[step];
            if (g_.chunk_tiles(owner, chunk) == 0 || !mine()) continue;
            core_.annotate(chunk);
            for (std::uint32_t tile = g_.chunk_begin(owner, chunk);
                 tile < g_.chunk_end(owner, chunk); ++tile) {
                if (!core_.twait(args_.word(g_.summed(tile)), 1, owner)) return false;
                const bool near = args_.same_node(owner);
                partials_.get(near ? owner : args_.rank, args_.output(tile),
                              args_.result(near ? args_.peers[owner].inbox : args_.inbox, tile));
            }
        }
        return true;
    }

    // Returns true where the next item is this block's.
    bool mine() { return item_++ % core_.count() == core_.index(); }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Partials<Core> partials_;
    bool shows_ = false;   // results for ranks of the node lie in the inbox too
    bool stages_ = false;  // results for other nodes lie in the outbox too
    std::uint32_t item_ = 0;
};

MKERNEL_ASCEND_KERNEL(aiv, gemm_reduce, comm, Comm, Args)

}  // namespace mkernel::ascend::gemm_reduce
