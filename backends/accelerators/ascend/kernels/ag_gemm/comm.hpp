// AllGather+GEMM, communication kernel (vector cores).
//
// Data flow: the own rows of A, in the user's tensor, go to the own slot in every other rank's inbox.
//   1. Blocks share destinations and chunks (destinations.hpp). Chunks leave in `send_order`, the
//      order in which their receivers want them.
//   2. Same node: TPUT each tile through UB into the peer's slot, fence, TNOTIFY arrived.
//   3. Other node: TPUT each tile into the outbox, fence, then for each such rank one command to
//      the NIC proxy: put the chunk's range, raise arrived there when the data is visible.
// Ordering: a signal never becomes visible before its chunk (announce.hpp).
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"
#include "backends/accelerators/ascend/kernels/destinations.hpp"

namespace mkernel::ascend::ag_gemm {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), destinations_(core, args, g_.world) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        return destinations_.each(
            g_.chunks(),
            [&](std::uint32_t peer, std::uint32_t i) {
                return send_near(peer, args_.send_order[i]);
            },
            [&](std::uint32_t i) { return send_far(args_.send_order[i]); });
    }

  private:
    bool send_near(std::uint32_t peer, std::uint32_t chunk) {
        core_.annotate(chunk);
        copy_tiles(peer, args_.peers[peer].inbox + g_.slot_offset(peer, args_.rank), chunk);
        core_.fence();
        return announce(core_, args_, peer, g_.arrived(args_.rank, chunk));
    }

    bool send_far(std::uint32_t chunk) {
        core_.annotate(chunk);
        copy_tiles(args_.rank, args_.outbox, chunk);
        core_.fence();
        const Range range = g_.chunk_range(chunk);
        for (const std::uint32_t peer : destinations_) {
            const std::uint64_t to = g_.slot_offset(peer, args_.rank) + range.offset;
            if (!announce(core_, args_, peer, g_.arrived(args_.rank, chunk),
                          {range.offset, to, range.bytes})) {
                return false;
            }
        }
        return true;
    }

    // Copies the chunk's tiles from the user's tensor into a slot.
    void copy_tiles(std::uint32_t peer, std::byte* slot, std::uint32_t chunk) {
        const isa::RowBuffers buffers(g_.dtype, g_.tile_k);
        for (std::uint32_t t = chunk * g_.tiles_per_chunk; t < g_.chunk_end(chunk); ++t) {
            const std::uint32_t row_group = t / g_.k_tiles(), k_tile = t % g_.k_tiles();
            core_.tput(peer, args_.staged(slot, row_group, k_tile),
                       args_.own_tile(row_group, k_tile), buffers.ping, buffers.pong);
        }
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Destinations<Core> destinations_;
};

MKERNEL_ASCEND_KERNEL(aiv, ag_gemm, comm, Comm, Args)

}  // namespace mkernel::ascend::ag_gemm
