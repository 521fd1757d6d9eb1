// Rows of the tiles on their way into one buffer, in the order of rows, for bulk tensor copies: two warps
// of every block, which claim groups of rows in the order of tiles. The warp that claims a group copies it,
// so tiles become ready in order whichever blocks run.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/token_rows.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/moe/grouped.cuh"

namespace mkernel::hopper::moe {

class RowPermuter {
  public:
    __device__ RowPermuter(const GroupedArgs& args, const transport::DeviceWaiter& waiter,
                           std::uint64_t epoch)
        : args_(args), waiter_(waiter), epoch_(epoch), lane_(static_cast<int>(threadIdx.x) % 32) {}

    // Permutes until all groups are claimed. Called by one warp.
    __device__ void run() {
        const Tables& tables = args_.tables;
        const Tile* tile = tables.tiles();
        int number = 0;
        while (true) {
            int group = lane_ == 0 ? atomicAdd(&tables.claimed(), 1) : 0;
            group = __shfl_sync(0xFFFFFFFFu, group, 0);
            for (; number < group / kTileGroups && tile->expert >= 0; ++number) ++tile;
            if (tile->expert < 0) return;
            const int skipped = group % kTileGroups * kGroupRows;
            const int rows = min(tile->rows - skipped, kGroupRows);
            if (rows <= 0) continue;
            if (lane_ == 0) wait_for_tokens(args_, waiter_, epoch_, tile->first + skipped, rows);
            __syncwarp();
            copy(tile->first + skipped, rows);
            __syncwarp();
            if (lane_ == 0) tables.permuted()[number].add(1);
        }
    }

  private:
    static constexpr int kAhead = 2;  // loads of a row under way

    __device__ void copy(int first, int rows) const {
        const std::int64_t row_bytes = args_.row_bytes;
        char* const to = args_.permuted + first * row_bytes;
        const char* from[kGroupRows];
#pragma unroll
        for (int row = 0; row < kGroupRows; ++row) {
            from[row] = token_row(args_, first + min(row, rows - 1));
        }
        for (std::int64_t at = lane_ * 16; at < row_bytes; at += 512 * kAhead) {
            uint4 found[kAhead][kGroupRows];
            for_each(at, row_bytes, rows, [&](int part, int row, std::int64_t byte) {
                found[part][row] = ptx::load_16(from[row] + byte);
            });
            for_each(at, row_bytes, rows, [&](int part, int row, std::int64_t byte) {
                ptx::store_16(to + row * row_bytes + byte, found[part][row]);
            });
        }
    }

    template <class Body>
    __device__ __forceinline__ static void for_each(std::int64_t at, std::int64_t end, int rows,
                                                    Body&& body) {
#pragma unroll
        for (int part = 0; part < kAhead; ++part) {
#pragma unroll
            for (int row = 0; row < kGroupRows; ++row) {
                if (row < rows && at + part * 512 < end) body(part, row, at + part * 512);
            }
        }
    }

    const GroupedArgs& args_;
    const transport::DeviceWaiter& waiter_;
    std::uint64_t epoch_;
    int lane_;
};

// Waits, on the loader's side, until all rows of tile `number` are there, for bulk copies too. Called by one
// thread.
__device__ inline void wait_for_tile(const GroupedArgs& args, const transport::DeviceWaiter& waiter,
                                     std::uint64_t epoch, int number, const Tile& tile) {
    const transport::AddedWord& permuted = args.tables.permuted()[number];
    const auto groups = static_cast<std::uint64_t>((tile.rows + kGroupRows - 1) / kGroupRows);
    if (!permuted.reached(groups)) {
        // Waited for first, so that a deadline names the rank whose tokens are missing.
        wait_for_tokens(args, waiter, epoch, tile.first, tile.rows);
        waiter.until(permuted, groups,
                     {transport::kOwnBlocks, static_cast<std::uint32_t>(args.workspace.rank),
                      static_cast<std::uint32_t>(number)});
    }
    ptx::fence_async_proxy();
}

}  // namespace mkernel::hopper::moe
