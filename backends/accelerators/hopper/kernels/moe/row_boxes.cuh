// Tokens on their way into the stages by bulk tensor copies, a box of one row each: two warps of the block,
// of which each thread copies rows of its own.
#pragma once

#include "backends/accelerators/hopper/kernels/moe/parts.cuh"
#include "backends/accelerators/hopper/kernels/moe/token_rows.cuh"
#include "backends/accelerators/hopper/ptx/sync.cuh"
#include "backends/accelerators/hopper/ptx/tensor.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper::moe {

template <class C>
class RowBoxer {
  public:
    // `thread`: of kRowWarps * 32.
    __device__ RowBoxer(Shared<C>& shared, const GroupedArgs& args, int thread)
        : shared_(shared), args_(args), lane_(thread % 32), first_(thread / 32 * kRowsOfWarp) {}

    // `rows` rows from `first` on, all of K, once the tokens of other ranks among them are there.
    __device__ void tile(const transport::DeviceWaiter& waiter, std::uint64_t epoch, int first,
                         int rows) {
        const int mine = min(rows - first_, kRowsOfWarp);  // possibly none
        if (mine > 0 && lane_ == 0) wait_for_tokens(args_, waiter, epoch, first + first_, mine);
        __syncwarp();
        ptx::fence_async_proxy();
        TokenPlace from[kRows] = {};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (row(i) < mine) from[i] = token_place(args_, first + first_ + row(i));
        }
        const int steps = (args_.k + kTileK - 1) / kTileK;
        for (int step = 0; step < steps; ++step, cursor_.next()) {
            shared_.empty[cursor_.slot].wait(cursor_.parity ^ 1);
            ptx::Mbarrier* const full = &shared_.full[cursor_.slot];
            if (lane_ == 0) full->expect(max(mine, 0) * kRowBytes);
            __syncwarp();
            unsigned char* const stage = shared_.stages[cursor_.slot] + first_ * kRowBytes;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (row(i) >= mine) continue;
                ptx::load_box(stage + row(i) * kRowBytes, from[i].own ? &args_.rows : &args_.there,
                              full, step * kTileK, from[i].number);
            }
        }
    }

  private:
    static constexpr int kRowBytes = kTileK * kElementBytes;
    static constexpr int kRowsOfWarp = kTileM / kRowWarps;
    static constexpr int kRows = kRowsOfWarp / 32;  // of one thread

    // Among the warp's rows, the thread's `i`th.
    __device__ int row(int i) const { return i * 32 + lane_; }

    Shared<C>& shared_;
    const GroupedArgs& args_;
    int lane_, first_;
    Cursor<C::kStages> cursor_;
};

}  // namespace mkernel::hopper::moe
