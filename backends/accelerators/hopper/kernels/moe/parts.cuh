// The parts of the tiles that a block computes, and the loads that its loader makes for them.
#pragma once

#include "backends/accelerators/cuda/kernels/e4m3.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/moe/grouped.cuh"
#include "backends/accelerators/hopper/ptx/gather.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper::moe {

inline constexpr int kRowWarps = 2;  // that gather or permute

// A block's part of a cluster's tile.
struct Part {
    Tile tile;
    int number;       // of the tile
    int first, rows;  // rows of this block: possibly none
    int column;       // of the results
    bool shares;      // the blocks have the same columns, and load them for each other
};

// Calls body(part) for each of this block's parts, in order. Both blocks of a cluster have as many. `width`:
// columns of results that a tile has.
template <class Body>
__device__ __forceinline__ void for_each_part(const GroupedArgs& args, int width, Body&& body) {
    const int block = static_cast<int>(blockIdx.x) % 2;
    const int clusters = static_cast<int>(gridDim.x) / 2;
    const int single = (args.n + width - 1) / width;
    const int pairs = (single + 1) / 2;
    const Tile* const tiles = args.tables.tiles();
    int item = static_cast<int>(blockIdx.x) / 2;
    int before = 0;
    int number = 0;
    for (Tile now = tiles[0]; now.expert >= 0; now = tiles[++number]) {
        const bool shares = now.rows > kTileM;
        const int items = shares ? single : pairs;
        for (; item - before < items; item += clusters) {
            const int at = item - before;
            if (shares) {
                const int skipped = block * kTileM;
                body(Part{now, number, now.first + skipped, min(now.rows - skipped, kTileM),
                          at * width, true});
            } else {
                body(Part{now, number, now.first, now.rows, (2 * at + block) * width, false});
            }
        }
        before += items;
    }
}

// Copies the scales that come with a stage, those of A with kRows. Called by a warp.
template <class C, bool kRows, bool kGated>
__device__ __forceinline__ void load_scales(Shared<C>& shared, int slot, const GroupedArgs& args,
                                            const Part& part, int step) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* const to = &shared.stage_scales[slot * C::kStageScales];
    if constexpr (kRows) {
        const float* const from = args.row_scales + part.first * args.scales_a_row + step;
#pragma unroll
        for (int row = lane; row < kTileM; row += kWarp) {
            if (row < part.rows) ptx::copy_4(to + row, from + row * args.scales_a_row);
        }
    }
    if (lane < 2) {
        // Each half of a tile is one block of columns; there may be no such columns.
        const int blocks = ((kGated ? 2 : 1) * args.n + kScaledBlock - 1) / kScaledBlock;
        const int column = part.column + lane * (kGated ? args.n : kScaledBlock);
        const std::int64_t block =
            std::int64_t{part.tile.expert} * blocks + min(column / kScaledBlock, blocks - 1);
        ptx::copy_4(to + kTileM + lane, args.b_scales + block * (args.k / kScaledBlock) + step);
    }
    ptx::arrive_after_copies(&shared.full[slot]);
}

// Loads the boxes of a stage, of the weight and, with kBoxes, of A. Called by one thread.
template <class C, class In, bool kNMajorB, bool kBoxes, bool kGated>
__device__ __forceinline__ void load_boxes(Shared<C>& shared, int slot, const GroupedArgs& args,
                                           const Part& part, int k) {
    constexpr int kShare = C::kShareN;
    constexpr std::uint32_t kBoxBytes = kBoxRows * kTileK * kElementBytes;
    static_assert(C::kCluster == 2 && C::kTileN == 2 * kShare);
    static_assert(C::kStageScales == 0 ||
                  (kStepK<In> == kScaledBlock && C::kTileN == 2 * kScaledBlock));
    const int block = static_cast<int>(ptx::block_in_cluster());
    const int from = part.shares ? block * kShare : 0;
    const int end = part.shares ? from + kShare : C::kTileN;
    const int boxes = kBoxes ? (part.rows + kBoxRows - 1) / kBoxRows : 0;
    ptx::Mbarrier* const full = &shared.full[slot];
    unsigned char* const stage = shared.stages[slot];
    full->expect(C::kBBytes + boxes * kBoxBytes);
    for (int box = 0; box < boxes; ++box) {
        ptx::load_box(stage + box * kBoxBytes, &args.rows, full, k, part.first + box * kBoxRows);
    }
    constexpr int kBox = kNMajorB ? kSliceN : kShare;  // columns
    for (int n = from; n < end; n += kBox) {
        unsigned char* const at = stage + C::kABytes + n * kTileK * kElementBytes;
        // With gates, the second half of the tile's columns are the up ones, N after the gate's.
        const int column = part.column + (kGated && n >= kShare ? args.n + n - kShare : n);
        const int x = kNMajorB ? column : k;
        const int y = kNMajorB ? k : column;
        if (part.shares) {
            ptx::load_box_to(3, at, &args.b, full, x, y, part.tile.expert);
        } else {
            ptx::load_box(at, &args.b, full, x, y, part.tile.expert);
        }
    }
}

// Loads all stages of a part. Called by one thread, which `leads`; by the whole warp where scales come with the
// stages.
template <class C, class In, bool kNMajorB, bool kBoxes, bool kGated>
__device__ __forceinline__ void load_part(Shared<C>& shared, Cursor<C::kStages>& cursor,
                                          const GroupedArgs& args, const Part& part, bool leads) {
    const int steps = (args.k + kStepK<In> - 1) / kStepK<In>;
    for (int step = 0; step < steps; ++step, cursor.next()) {
        shared.empty[cursor.slot].wait(cursor.parity ^ 1);
        if (leads) {
            load_boxes<C, In, kNMajorB, kBoxes, kGated>(shared, cursor.slot, args, part,
                                                        step * kStepK<In>);
        }
        if constexpr (C::kStageScales > 0) {
            __syncwarp();
            load_scales<C, kBoxes, kGated>(shared, cursor.slot, args, part, step);
        }
    }
}

}  // namespace mkernel::hopper::moe
