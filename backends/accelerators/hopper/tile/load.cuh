// The loader's side of the stages: one thread of the block.
#pragma once

#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// Loads a tile of elements [128, kTileN] in slices, up to two a stage, for Multiplier::add_tile.
template <class C>
__device__ inline void load_tile(Shared<C>& shared, Cursor<C::kStages>& cursor,
                                 const CUtensorMap* map, int column, int row, int z) {
    static_assert(2 * C::kSliceBytes <= C::kStageBytes);
    for (int slice = 0; slice < C::kSlices; slice += 2, cursor.next()) {
        ptx::Mbarrier* full = &shared.full[cursor.slot];
        unsigned char* stage = shared.stages[cursor.slot];
        shared.empty[cursor.slot].wait(cursor.parity ^ 1);
        const int count = min(2, C::kSlices - slice);
        full->expect(count * C::kSliceBytes);
        for (int which = 0; which < count; ++which) {
            ptx::load_box(stage + which * C::kSliceBytes, map, full,
                          column + (slice + which) * kSliceN, row, z);
        }
    }
}

// The two operands of a product as bulk tensor copies see them. `a`: boxes [128, 64] of rows of K. `b`:
// K-major: boxes [kShareN, 64] of rows of K; N-major: boxes [kBoxDepth of K, 64 of N]. With e4m3 elements
// boxes have 128 of K, and are K-major.
template <class C, bool kNMajorB, int kStep = kTileK>
struct Operands {
    const CUtensorMap* b;
    int column;  // of the output tile

    // Loads A's rows from `row` on, and B, in the steps of K from `first` to before `end`.
    __device__ void load(Shared<C>& shared, Cursor<C::kStages>& cursor, const CUtensorMap* a,
                         int row, int first, int end) const {
        for (int step = first; step < end; ++step, cursor.next()) {
            ptx::Mbarrier* full = &shared.full[cursor.slot];
            unsigned char* stage = shared.stages[cursor.slot];
            shared.empty[cursor.slot].wait(cursor.parity ^ 1);
            full->expect(C::kStageBytes);
            ptx::load_box(stage, a, full, step * kStep, row);
            load_share(stage + C::kABytes, full, step * kStep);
        }
    }

  private:
    __device__ void load_share(unsigned char* to, ptx::Mbarrier* full, int k) const {
        const int block = C::kCluster > 1 ? static_cast<int>(ptx::block_in_cluster()) : 0;
        // The block's share is a part of N, or, where that is no whole slices and b is N-major, of K.
        constexpr bool kOfK = kNMajorB && C::kBoxDepth < kTileK;
        const int n = kOfK ? 0 : block * C::kShareN;
        const int depth = kOfK ? block * C::kBoxDepth : 0;
        to += (n * kTileK + depth * kSliceN) * kElementBytes;
        if constexpr (!kNMajorB) {
            load_one(to, full, k, column + n);
        } else {
            constexpr int kColumns = kOfK ? C::kTileN : C::kShareN;
#pragma unroll
            for (int at = 0; at < kColumns; at += kSliceN) {
                load_one(to + at * kTileK * kElementBytes, full, column + n + at, k + depth);
            }
        }
    }

    __device__ void load_one(unsigned char* to, ptx::Mbarrier* full, int x, int y) const {
        if constexpr (C::kCluster > 1) {
            ptx::load_box_to((1u << C::kCluster) - 1, to, b, full, x, y);
        } else {
            ptx::load_box(to, b, full, x, y);
        }
    }
};

}  // namespace mkernel::hopper
