// The bulk engine: one thread moves bytes between any two global addresses through stages of shared
// memory, with bulk loads that complete on mbarriers and bulk stores that complete by groups.
//
// One SM's port carries about 45 GB/s to a peer, so a few blocks fill a link, and the other threads
// of a block are free. Sizes are 64-bit. `dst` and `src` must lie alike within 16 bytes
// (`alike`); plain_copy.cuh copies between other addresses.
//
// Order: bytes that another GPU or another thread wrote may be read after an acquire *and*
// ptx::fence_async_proxy(). Copied bytes may be published by a release once `complete` has returned.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/bulk.cuh"
#include "backends/accelerators/cuda/ptx/sync.cuh"

namespace mkernel::cuda::transfer {

// Returns true where the bulk engine can copy between these addresses.
__host__ __device__ inline bool alike(const void* dst, const void* src) {
    return ((reinterpret_cast<std::uintptr_t>(dst) ^ reinterpret_cast<std::uintptr_t>(src)) & 15) ==
           0;
}

// Stages that one thread, always the same, loads into and stores from. Any number of copies may
// follow each other without a pause between them. `kOpen`: stores that may still read their stages
// when a new load starts; the other stages hold loads.
template <int kStages, int kOpen = kStages / 2>
class BulkRing {
  public:
    // `stages`: kStages * stage_bytes of shared memory, aligned to 128; `full`: kStages barriers in
    // shared memory; stage_bytes: a multiple of 16.
    __device__ BulkRing(char* stages, ptx::Mbarrier* full, std::uint32_t stage_bytes)
        : stages_(stages), full_(full), stage_bytes_(stage_bytes) {}

    // Called once, by the thread that drives the ring.
    __device__ void init() {
        for (int i = 0; i < kStages; ++i) full_[i].init(1);
        ptx::publish_barriers();
    }

    // Copies pieces `share`, `share + shares`, ... of one stage each. Addresses and `nbytes` are
    // multiples of 16. On return all loads are done and the stores are under way.
    __device__ void copy(char* dst, const char* src, std::uint64_t nbytes, std::uint32_t share,
                         std::uint32_t shares) {
        spread(src, nbytes, share, shares,
               [&](std::uint64_t at, const char* piece, std::uint32_t bytes) {
                   ptx::store_bytes(dst + at, piece, bytes);
               });
    }

    // Copies in the same way to wherever `store(at, piece, bytes)` starts the stores of the piece at offset
    // `at`.
    template <class Store>
    __device__ void spread(const char* src, std::uint64_t nbytes, std::uint32_t share,
                           std::uint32_t shares, Store&& store) {
        const std::uint64_t pieces = (nbytes + stage_bytes_ - 1) / stage_bytes_;
        if (share >= pieces) return;
        const std::uint64_t mine = (pieces - share - 1) / shares + 1;
        const auto offset = [&](std::uint64_t i) {
            return (share + i * shares) * static_cast<std::uint64_t>(stage_bytes_);
        };
        const auto bytes = [&](std::uint64_t at) {
            return static_cast<std::uint32_t>(min(nbytes - at, std::uint64_t{stage_bytes_}));
        };
        const auto load = [&](std::uint64_t i) {
            const std::uint64_t at = offset(i);
            ptx::Mbarrier& full = full_[(turn_ + i) % kStages];
            full.expect(bytes(at));
            ptx::load_bytes(stage(turn_ + i), src + at, bytes(at), &full);
        };

        if (turn_ != 0) ptx::wait_groups_read<0>();  // stores of the previous copy
        std::uint64_t loaded = 0;
        for (; loaded < min(mine, std::uint64_t{kStages}); ++loaded) load(loaded);
        for (std::uint64_t i = 0; i < mine; ++i) {
            const std::uint64_t at = offset(i);
            full_[(turn_ + i) % kStages].wait((turn_ + i) / kStages & 1);
            store(at, stage(turn_ + i), bytes(at));
            ptx::close_group();
            if (i >= kOpen && loaded < mine) {
                ptx::wait_groups_read<kOpen>();  // the stage of piece i - kOpen is free
                load(loaded++);
            }
        }
        turn_ += mine;
    }

    // Waits until the stages may be used for something else, or end with their block.
    __device__ void release_stages() { ptx::wait_groups_read<0>(); }

    // Waits until all bytes of all copies so far are written; a release by this thread then publishes them.
    __device__ void complete() {
        ptx::wait_groups<0>();
        ptx::fence_async_proxy();
    }

  private:
    __device__ char* stage(std::uint64_t piece) const {
        return stages_ + piece % kStages * stage_bytes_;
    }

    char* stages_;
    ptx::Mbarrier* full_;
    std::uint32_t stage_bytes_;
    std::uint64_t turn_ = 0;  // pieces so far
};

// One converged warp copies share `share` of `shares` of a copy of any size between addresses that
// are `alike`: lane 0 drives the ring (`init` and `complete` are its too), the others move the
// unaligned ends by plain stores, which a release after __syncwarp publishes.
template <class Ring>
__device__ void copy_bulk(Ring& ring, char* dst, const char* src, std::uint64_t nbytes,
                          std::uint32_t share, std::uint32_t shares) {
    const auto head = min(-reinterpret_cast<std::uintptr_t>(dst) & 15, nbytes);
    const std::uint64_t body = (nbytes - head) & ~std::uint64_t{15};
    const std::uint64_t tail = nbytes - head - body;
    const unsigned lane = threadIdx.x % 32;
    if (lane == 0) {
        ring.copy(dst + head, src + head, body, share, shares);
    } else if (share == 0) {
        const std::uint64_t i = lane - 1;  // 0 to 30: both ends have at most 15 bytes
        if (i < head) dst[i] = src[i];
        if (i >= 15 && i - 15 < tail) dst[head + body + i - 15] = src[head + body + i - 15];
    }
    __syncwarp();
}

}  // namespace mkernel::cuda::transfer
