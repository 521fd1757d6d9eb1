// AllGather+GEMM, communication kernel (vector cores).
//
// Data flow: the own rows of A, in the user's tensor, go to every other rank's staging slot.
//   1. Each same-node rank is one destination; all ranks of other nodes together are one more,
//      whose chunks are packed once and sent from the packed copy.
//   2. More blocks than destinations: blocks are dealt out evenly to destinations and share their
//      chunks; else (chunk, destination) items go round-robin over blocks. Chunks leave in
//      `send_order`, the order in which their receivers want them.
//   3. Before its first put to a destination a block waits until it has released epoch - 2, whose
//      slots are about to be overwritten.
//   4. Same node: TPUT each tile through UB into the peer's slot, fence, TNOTIFY flag and summary.
//   5. Other node: TPUT each tile into the own slot, fence, then for each such rank one command to
//      the NIC proxy: put the chunk's range, raise its flag there when the data is visible.
// Ordering: a flag never becomes visible before its chunk (fence + release, or put-with-signal).
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::ag_gemm {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args) : core_(core), args_(args), g_(args.geometry) {}

    // False if a wait was aborted or timed out.
    bool run() {
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t peer = (args_.rank + step) % g_.world;
            if (args_.same_node(peer)) {
                destinations_[count_++] = peer;
            } else {
                far_[far_count_++] = peer;
            }
        }
        if (far_count_ > 0) destinations_[count_++] = kFar;
        if (count_ == 0) return true;

        const std::uint32_t blocks = core_.count(), block = core_.index();
        if (blocks > count_) {
            const std::uint32_t which = block % count_, member = block / count_;
            const std::uint32_t members = (blocks - which + count_ - 1) / count_;
            for (std::uint32_t i = member; i < g_.chunks(); i += members) {
                if (!send(which, args_.send_order[i])) return false;
            }
        } else {
            for (std::uint32_t item = block; item < g_.chunks() * count_; item += blocks) {
                if (!send(item % count_, args_.send_order[item / count_])) return false;
            }
        }
        return true;
    }

  private:
    static constexpr std::uint32_t kFar = 0xffffffff;

    bool send(std::uint32_t which, std::uint32_t chunk) {
        const std::uint32_t destination = destinations_[which];
        if ((may_write_ >> which & 1) == 0) {
            core_.annotate(kNoAnnotation);
            if (destination != kFar) {
                if (!wait_released(core_, args_, g_.released(0), destination)) return false;
            } else {
                for (std::uint32_t i = 0; i < far_count_; ++i) {
                    if (!wait_released(core_, args_, g_.released(0), far_[i])) return false;
                }
            }
            may_write_ |= std::uint64_t{1} << which;
        }
        core_.annotate(chunk);
        return destination != kFar ? send_near(destination, chunk) : send_far(chunk);
    }

    bool send_near(std::uint32_t peer, std::uint32_t chunk) {
        copy_tiles(peer, args_.peers[peer].workspace, chunk);
        core_.fence();
        std::byte* pad = args_.peers[peer].pad;
        core_.tnotify(peer, pad, args_.signal_base + g_.flag(args_.parity(), args_.rank, chunk), 1);
        core_.tnotify(peer, pad, args_.signal_base + g_.summary(args_.parity(), args_.rank), 1);
        return true;
    }

    bool send_far(std::uint32_t chunk) {
        copy_tiles(args_.rank, args_.workspace, chunk);
        core_.fence();
        const Range range = g_.chunk_range(chunk);
        const std::uint64_t offset = g_.slot_offset(args_.parity(), args_.rank) + range.offset;
        for (std::uint32_t i = 0; i < far_count_; ++i) {
            const bool queued = core_.nic_put(
                {.local_offset = offset,
                 .remote_offset = offset,
                 .bytes = range.bytes,
                 .peer = far_[i],
                 .region = args_.region,
                 .signal = args_.signal_base + g_.flag(args_.parity(), args_.rank, chunk),
                 .value = 1});
            if (!queued) return false;
        }
        return true;
    }

    // The chunk's tiles from the user's tensor into the own rank's slot of a workspace.
    void copy_tiles(std::uint32_t peer, std::byte* workspace, std::uint32_t chunk) {
        const std::uint32_t bytes = g_.tile_m * g_.tile_k * isa::bytes_of(g_.dtype);
        const isa::Tile ping{
            .buffer = isa::Buffer::UB, .dtype = g_.dtype, .rows = g_.tile_m, .cols = g_.tile_k};
        isa::Tile pong = ping;
        pong.offset = bytes;
        for (std::uint32_t t = chunk * g_.tiles_per_chunk; t < g_.chunk_end(chunk); ++t) {
            const std::uint32_t row_group = t / g_.k_tiles(), k_tile = t % g_.k_tiles();
            core_.tput(peer, args_.staged(workspace, args_.rank, row_group, k_tile),
                       args_.own_tile(row_group, k_tile), ping, pong);
        }
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    std::uint32_t destinations_[kMaxWorld] = {};  // same-node ranks, then perhaps kFar
    std::uint32_t far_[kMaxWorld] = {};           // ranks of other nodes
    std::uint32_t count_ = 0, far_count_ = 0;
    std::uint64_t may_write_ = 0;  // bit per destination: it has released epoch - 2
};

MKERNEL_ASCEND_KERNEL(aiv, ag_gemm, comm, Comm, Args)

}  // namespace mkernel::ascend::ag_gemm
