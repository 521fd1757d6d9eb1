// A block of the kernel of few_rows.cuh: its threads, their barriers, its shared memory, its part of a tile.
#pragma once

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows.cuh"
#include "backends/accelerators/hopper/ptx/wgmma.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// Two warpgroups multiply, 64 columns of the tile each. In the third, a thread of the first warp loads, and the second
// warp reads the epoch.
inline constexpr int kFewMultipliers = 2 * kWarpgroup;
inline constexpr int kFewThreads = kFewMultipliers + kWarpgroup;

static_assert(kFewDepthBytes == kTileK * kElementBytes);

template <int kRows>
struct FewRows {
    static constexpr int kWeightBytes = kFewColumns * kTileK * kElementBytes;
    static constexpr int kStageBytes = kWeightBytes + kRows * kTileK * kElementBytes;
    static constexpr int kStages = (kSharedBytes - 1024) / kStageBytes;
    // Floats from one row of partial sums to the next: lanes that write rows and columns of a block of
    // accumulators meet no bank twice.
    static constexpr int kPitch = kFewColumns + 4;

    alignas(1024) unsigned char stages[kStages][kStageBytes];
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
    std::uint64_t epoch;

    // The partial sums [kRows, kPitch], in the place of the stages once all of them were multiplied.
    __device__ float* sums() { return reinterpret_cast<float*>(stages); }
    static_assert(kRows * kPitch * sizeof(float) <= kStages * kStageBytes);
};

// The columns of a tile, and the rows of it that this block adds up, in vectors of 8 columns, row by row.
struct FewShare {
    int column;   // the tile's first
    int vectors;  // a row of it
    int first_row, end_row;
    int first, end;

    __device__ FewShare(const FewRowsArgs& args, int tile, int part, int splits)
        : column(tile * kFewColumns),
          vectors(min(kFewColumns, args.n - column) / 8),
          first_row(args.m * part / splits),
          end_row(args.m * (part + 1) / splits),
          first(first_row * vectors),
          end(end_row * vectors) {}
};

// A barrier of the multipliers' threads only.
__device__ __forceinline__ void multipliers_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(kFewMultipliers) : "memory");
}

// Signals to the loader's warp that the multipliers are done with their partial sums: not by __syncthreads,
// which all threads must reach at one place of the program.
__device__ __forceinline__ void free_stages() {
    asm volatile("bar.arrive 2, %0;" ::"n"(kFewMultipliers + kWarp) : "memory");
}
__device__ __forceinline__ void await_free_stages() {
    asm volatile("bar.sync 2, %0;" ::"n"(kFewMultipliers + kWarp) : "memory");
}

}  // namespace mkernel::hopper
