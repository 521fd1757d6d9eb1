// Tiles that come from peers: one thread brings them, piece by piece, through small buffers of shared
// memory into this GPU's memory, beside the work of the block. A pull holds nobody up: what travels
// through the SM's port towards a full link is a request, and the answer comes when it can.
#pragma once

#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// A block's pull buffers, driven by one thread, always the same.
template <class C>
class Puller {
  public:
    __device__ explicit Puller(Shared<C>& shared) : shared_(shared) {}

    // Brings a tile of kTileM rows and C::kSlices slices. `from(buffer, barrier, x, y)` starts the
    // load of the piece [kPieceRows, kSliceN] at column x and row y of the tile, `to(buffer, x, y)` its
    // store. All is written when this returns.
    template <class From, class To>
    __device__ void tile(From&& from, To&& to) {
        constexpr int kPieces = C::kSlices * kTileM / kPieceRows;
        const auto load = [&](int piece) {
            const int buffer = piece % C::kPullBuffers;
            shared_.arrived[buffer].expect(kPieceBytes);
            from(&shared_.pulls[buffer * kPieceBytes], &shared_.arrived[buffer], column(piece),
                 row(piece));
        };
        static_assert(kPieces % C::kPullBuffers == 0);
        for (int piece = 0; piece < C::kPullBuffers; ++piece) load(piece);
        for (int piece = 0; piece < kPieces; ++piece) {
            const int buffer = piece % C::kPullBuffers;
            shared_.arrived[buffer].wait((turn_ + piece / C::kPullBuffers) & 1);
            to(&shared_.pulls[buffer * kPieceBytes], column(piece), row(piece));
            ptx::close_group();
            const int next = piece - 1 + C::kPullBuffers;  // into the buffer of the piece before
            if (piece > 0 && next < kPieces) {
                ptx::wait_groups_read<1>();
                load(next);
            }
        }
        turn_ += kPieces / C::kPullBuffers;
        ptx::wait_groups<0>();
    }

  private:
    __device__ static int column(int piece) { return piece / (kTileM / kPieceRows) * kSliceN; }
    __device__ static int row(int piece) { return piece % (kTileM / kPieceRows) * kPieceRows; }

    Shared<C>& shared_;
    int turn_ = 0;  // uses of each buffer so far
};

}  // namespace mkernel::hopper
