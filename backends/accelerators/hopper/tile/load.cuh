// The loader's side of the stages: one thread of the block.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/block.cuh"
#include "backends/accelerators/hopper/tile/boxes.cuh"

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
    const Boxes* b;
    int column;   // of the output tile
    int columns;  // of b, from there on

    // Loads A's `rows` rows from `row` on, possibly none, or those of a tile, and B, in the steps of K from `first`
    // to before `end`.
    __device__ void load(Shared<C>& shared, Cursor<C::kStages>& cursor, const Boxes* a, int row,
                         int rows, int first, int end) const {
        const Box box = box_of(*a, kTileM, rows);
        const int bytes = (box.rows + rows_of_b()) * kRowBytes;
        for (int step = first; step < end; ++step, cursor.next()) {
            ptx::Mbarrier* full = &shared.full[cursor.slot];
            unsigned char* stage = shared.stages[cursor.slot];
            shared.empty[cursor.slot].wait(cursor.parity ^ 1);
            full->expect(bytes);
            if (box.rows > 0) ptx::load_box(stage, box.map, full, step * kStep, row);
            each_box(step * kStep, [&](const CUtensorMap* map, int offset, int x, int y) {
                unsigned char* const to = stage + C::kABytes + offset;
                if constexpr (C::kCluster > 1) {
                    ptx::load_box_to((1u << C::kCluster) - 1, to, map, full, x, y);
                } else {
                    ptx::load_box(to, map, full, x, y);
                }
            });
        }
    }

    // Prefetches this block's share of B of a step.
    __device__ void prefetch(int step) const {
        each_box(step * kStep,
                 [](const CUtensorMap* map, int, int x, int y) { ptx::prefetch_box(map, x, y); });
    }

  private:
    static constexpr int kRowBytes = kTileK * kElementBytes;

    // Returns B's rows that all blocks together load, of 64 columns of a step each, where b is N-major as many.
    __device__ int rows_of_b() const {
        if constexpr (kNMajorB) {
            return min((columns + kSliceN - 1) / kSliceN * kSliceN, C::kTileN);
        }
        int rows = 0;
        for (int block = 0; block < C::kCluster; ++block) {
            rows += box_of(*b, C::kShareN, columns - block * C::kShareN).rows;
        }
        return rows;
    }

    // Calls body(map, offset, x, y) for each box of this block's share from `k` on: a part of N, or, where that is no
    // whole slices and b is N-major, of K.
    template <class Body>
    __device__ void each_box(int k, Body&& body) const {
        const int block = C::kCluster > 1 ? static_cast<int>(ptx::block_in_cluster()) : 0;
        constexpr bool kOfK = kNMajorB && C::kBoxDepth < kTileK;
        const int n = kOfK ? 0 : block * C::kShareN;
        const int depth = kOfK ? block * C::kBoxDepth : 0;
        const int offset = (n * kTileK + depth * kSliceN) * kElementBytes;
        if constexpr (!kNMajorB) {
            const Box box = box_of(*b, C::kShareN, columns - n);
            if (box.rows > 0) body(box.map, offset, k, column + n);
        } else {
            constexpr int kColumns = kOfK ? C::kTileN : C::kShareN;
#pragma unroll
            for (int at = 0; at < kColumns; at += kSliceN) {
                if (n + at >= columns) break;
                body(&b->whole, offset + at * kTileK * kElementBytes, column + n + at, k + depth);
            }
        }
    }
};

}  // namespace mkernel::hopper
