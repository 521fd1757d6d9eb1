// GEMM+ReduceScatter and GEMM+AllReduce, compute kernel (cube cores).
//
// Data flow: partial C = own a @ own b, in output tiles, for every owner.
//   1. Chunk 0 of every other owner, then the own chunk 0; then chunk 1 of each, and so on: owners
//      can sum, and links are in use, from the first round on. Tiles are dealt out to blocks in
//      this order.
//   2. A tile goes, in the partials' dtype, to the outbox. While the pipes are at work on the next one,
//      a fence of pipe FIX alone, and its chunk's `computed` counts it. Before the first one a block
//      waits until the ranks of other nodes have released epoch - 2, whose outbox the NIC has read by
//      then. It waits for nothing else.
//   3. In a world of one rank it goes straight to the output, converted to its dtype.
//   4. Leaves that vector cores add up go to the scratch instead.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/gemm/product.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::gemm_reduce {

template <class Core>
class Compute {
  public:
    Compute(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          product_(core, g_.tiling(), g_.dtype),
          released_(core, args, g_.world) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        product_.open();
        std::uint32_t number = 0;
        for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
            for (std::uint32_t step = 1; step <= g_.world; ++step) {
                const std::uint32_t owner = args_.order[step % g_.world];
                core_.annotate(chunk);
                for (std::uint32_t tile = g_.chunk_begin(owner, chunk);
                     tile < g_.chunk_end(owner, chunk); ++tile, ++number) {
                    if (number % core_.count() != core_.index()) continue;
                    if (!g_.adds_leaves() && !released_.wait_outbox()) return false;
                    compute(owner, chunk, tile);
                }
            }
        }
        product_.close();
        tell();
        core_.annotate(kNoAnnotation);
        // Without a communication kernel no other kernel releases the call.
        return !args_.compute_only || g_.world == 1 ||
               release(core_, args_, g_.world, g_.finished());
    }

  private:
    void compute(std::uint32_t owner, std::uint32_t chunk, std::uint32_t tile) {
        const Area at = g_.area(owner, tile);
        std::byte* const area = g_.adds_leaves() ? args_.scratch : args_.outbox;
        const isa::GlobalView to = g_.complete()
                                       ? args_.output(tile)
                                       : args_.partial(area + g_.outbox(owner), owner, tile);
        product_.same_rows(to, args_.b.sub(0, at.column, g_.k, at.columns),
                           args_.a.sub(at.row, 0, at.rows, g_.k),
                           [&](std::uint32_t k_tile) {
                               // FIX is through with the previous tile once these multiply.
                               if (k_tile + 1 == told_behind()) tell();
                           },
                           {g_.leaves(), g_.leaf_stride()});
        if (g_.complete()) return;
        stored_ = true;
        owner_ = owner;
        chunk_ = chunk;
    }

    // Returns the K tiles of the next result that are issued before S waits for this one.
    [[nodiscard]] std::uint32_t told_behind() const {
        const std::uint32_t k_tiles = divide_up(g_.k / g_.leaves(), g_.tile_k);
        return k_tiles < kAhead ? k_tiles : kAhead;
    }

    // Signals that the previous tile is in the outbox.
    void tell() {
        if (!stored_) return;
        stored_ = false;
        product_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.word(g_.computed(owner_, chunk_)), 1);
    }

    static constexpr std::uint32_t kAhead = 8;

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    gemm::Product<Core> product_;
    Released<Core> released_;
    bool stored_ = false;  // a tile of this owner's chunk, which nobody has been told of
    std::uint32_t owner_ = 0, chunk_ = 0;
};

MKERNEL_ASCEND_KERNEL(aic, gemm_reduce, compute, Compute, Args)

}  // namespace mkernel::ascend::gemm_reduce
