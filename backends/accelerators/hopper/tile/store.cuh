// The storer's side of the slices: one thread of the block.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

template <class C>
class Storer {
  public:
    __device__ explicit Storer(Shared<C>& shared) : shared_(shared) {}

    // Stores one tile in this GPU's memory: `store(slice, number)` starts the bulk stores of slice
    // `number`; all are complete when this returns.
    template <class Store>
    __device__ void tile(Store&& store) {
        for (int number = 0; number < C::kSlices; ++number) {
            shared_.written[cursor_.slot].wait(cursor_.parity);
            store(shared_.slices[cursor_.slot], number);
            ptx::close_group();
            if (number > 0) {
                ptx::wait_groups_read<1>();
                shared_.drained[before_].arrive();
            }
            before_ = cursor_.slot;
            cursor_.next();
        }
        ptx::wait_groups_read<0>();
        shared_.drained[before_].arrive();
        ptx::wait_groups<0>();
    }

    // Puts one tile to peers, piece by piece: `store(piece, x, y)` starts the stores of the piece
    // [kPieceRows, kSliceN] at column x and row y of the tile, at least `pace` clock cycles after the
    // previous ones. All blocks finish their tiles at about the same time, and the link takes several times
    // longer to carry them than memory does: stores that queue at a full link hold up the loads of the same
    // SM.
    template <class Store>
    __device__ void put(int pace, Store&& store) {
        long long next = clock64();
        for (int number = 0; number < C::kSlices; ++number) {
            shared_.written[cursor_.slot].wait(cursor_.parity);
            const unsigned char* slice = shared_.slices[cursor_.slot];
            for (int y = 0; y < kTileM; y += kPieceRows) {
                while (clock64() < next) __nanosleep(kPauseNs);
                next = clock64() + pace;
                store(slice + y / kPieceRows * kPieceBytes, number * kSliceN, y);
                ptx::close_group();
                ptx::wait_groups_read<0>();
            }
            shared_.drained[cursor_.slot].arrive();
            cursor_.next();
        }
        ptx::wait_groups<0>();
    }

  private:
    static constexpr int kPauseNs = 40;

    Shared<C>& shared_;
    Cursor<C::kSliceSlots> cursor_;
    int before_ = 0;
};

}  // namespace mkernel::hopper
