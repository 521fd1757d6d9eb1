// The forwarding of finished tiles between memories, piece by piece through small buffers of shared memory,
// beside the work of the block: to a peer at a pace, or within this GPU. A tile that waits in memory for the
// link holds up nothing (Storer::put states what a full link holds up), at the price of storing and loading
// it once more.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// `count` of a block's piece buffers, from `first` on, driven by one thread, always the same.
template <class C>
class TileForwarder {
  public:
    // `count`: a power of two. `pace`: least clock cycles between the stores of two pieces.
    __device__ TileForwarder(Shared<C>& shared, int first, int count, int pace)
        : shared_(shared), first_(first), count_(count), pace_(pace) {}

    // Carries a tile of kTileM rows and C::kSlices slices. `from(buffer, barrier, x, y)` starts the
    // load of the piece [kPieceRows, kSliceN] at column x and row y of the tile, `to(buffer, x, y)`
    // its stores. When this returns the stores are under way.
    template <class From, class To>
    __device__ void tile(From&& from, To&& to) {
        constexpr int kPieces = C::kSlices * kTileM / kPieceRows;
        static_assert(kPieces % C::kPieceBuffers == 0);
        const auto load = [&](int piece) {
            const int buffer = first_ + piece % count_;
            shared_.arrived[buffer].expect(kPieceBytes);
            from(&shared_.pieces[buffer * kPieceBytes], &shared_.arrived[buffer], column(piece),
                 row(piece));
        };
        ptx::wait_groups_read<0>();  // stores of the previous tile
        for (int piece = 0; piece < count_; ++piece) load(piece);
        for (int piece = 0; piece < kPieces; ++piece) {
            const int buffer = first_ + piece % count_;
            shared_.arrived[buffer].wait((turn_ + piece / count_) & 1);
            while (clock64() < next_) __nanosleep(kPauseNs);
            next_ = clock64() + pace_;
            to(&shared_.pieces[buffer * kPieceBytes], column(piece), row(piece));
            ptx::close_group();
            const int next = piece - 1 + count_;  // into the buffer of the piece before
            if (piece > 0 && next < kPieces) {
                ptx::wait_groups_read<1>();
                load(next);
            }
        }
        turn_ += kPieces / count_;
    }

    // Waits until all tiles so far are written; a release by this thread then publishes them.
    __device__ void complete() {
        ptx::wait_groups<0>();
        ptx::fence_async_proxy();
    }

  private:
    static constexpr int kPauseNs = 40;

    __device__ static int column(int piece) { return piece / (kTileM / kPieceRows) * kSliceN; }
    __device__ static int row(int piece) { return piece % (kTileM / kPieceRows) * kPieceRows; }

    Shared<C>& shared_;
    int first_, count_;
    int pace_;
    int turn_ = 0;  // uses of each buffer so far
    long long next_ = 0;
};

// Signals from the storer to a courier of the same block that so many tiles are in memory.
template <class C>
__device__ inline void tell_stored(Shared<C>& shared, std::uint32_t tiles) {
    ptx::fence_async_proxy();
    asm volatile(
        "st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(ptx::shared_address(&shared.stored)),
        "r"(tiles)
        : "memory");
}

template <class C>
__device__ inline void wait_stored(const Shared<C>& shared, std::uint32_t tiles) {
    std::uint32_t stored = 0;
    while (true) {
        asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                     : "=r"(stored)
                     : "r"(ptx::shared_address(&shared.stored))
                     : "memory");
        if (stored >= tiles) break;
        __nanosleep(100);
    }
    ptx::fence_async_proxy();
}

}  // namespace mkernel::hopper
