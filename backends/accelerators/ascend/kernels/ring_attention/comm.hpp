// Ring attention, communication kernel (vector cores).
//
// Data flow: the own keys and values go to every other rank that needs them, straight, chunk by
// chunk in the order in which they are seen there.
//   1. Blocks share destinations and chunks (destinations.hpp).
//   2. Same node: TPUT the chunk into the own slot of the peer's inbox, fence, TNOTIFY arrived.
//   3. Other node: TPUT it into the outbox, fence, then for each such rank one command to the NIC
//      proxy: put the chunk's range, raise arrived there when the data is visible.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/destinations.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/args.hpp"

namespace mkernel::ascend::ring_attention {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), destinations_(core, args, g_.world) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        return destinations_.each(
            g_.chunks(),
            [&](std::uint32_t peer, std::uint32_t chunk) { return send_near(peer, chunk); },
            [&](std::uint32_t chunk) { return send_far(chunk); });
    }

  private:
    bool send_near(std::uint32_t peer, std::uint32_t chunk) {
        if (!g_.needs(peer, args_.rank, chunk)) return true;
        core_.annotate(chunk);
        copy(peer, args_.peers[peer].inbox + g_.slot_offset(peer, args_.rank), chunk);
        core_.fence();
        return announce(core_, args_, peer, g_.arrived(args_.rank, chunk));
    }

    bool send_far(std::uint32_t chunk) {
        core_.annotate(chunk);
        bool packed = false;
        for (const std::uint32_t peer : destinations_) {
            if (!g_.needs(peer, args_.rank, chunk)) continue;
            if (!packed) {
                copy(args_.rank, args_.outbox, chunk);
                core_.fence();
                packed = true;
            }
            const Range range = g_.chunk_range(chunk);
            const std::uint64_t to = g_.slot_offset(peer, args_.rank) + range.offset;
            if (!announce(core_, args_, peer, g_.arrived(args_.rank, chunk),
                          {range.offset, to, range.bytes})) {
                return false;
            }
        }
        return true;
    }

    // Copies the chunk from the user's tensors into a slot.
    void copy(std::uint32_t peer, std::byte* slot, std::uint32_t chunk) {
        const isa::RowBuffers buffers(g_.dtype, g_.head_dim);
        const std::uint32_t piece = g_.piece_of(chunk), at = g_.chunk_start(chunk),
                            rows = g_.chunk_rows(chunk);
        for (const bool values : {false, true}) {
            for (std::uint32_t plane = 0; plane < g_.planes(); ++plane) {
                core_.tput(peer, args_.keys(slot, piece, values, plane, at, rows),
                           args_.own_keys(piece, values, plane, at, rows), buffers.ping,
                           buffers.pong);
            }
        }
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Destinations<Core> destinations_;
};

MKERNEL_ASCEND_KERNEL(aiv, ring_attention, comm, Comm, Args)

}  // namespace mkernel::ascend::ring_attention
