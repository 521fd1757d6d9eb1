// Tokens on their way into the stages, row by row: two warps of the block, which share each stage's rows.
#pragma once

#include "backends/accelerators/cuda/kernels/moe/token_rows.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/moe/parts.cuh"
#include "backends/accelerators/hopper/ptx/gather.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper::moe {

template <class C, class In>
class RowGatherer {
  public:
    // `thread`: of kRowWarps * 32.
    __device__ RowGatherer(Shared<C>& shared, const GroupedArgs& args, int thread)
        : shared_(shared), args_(args), starts_(shared.starts), thread_(thread) {}

    // Gathers `rows` rows from `first` on, all of K, once the tokens of other ranks among them are there.
    __device__ void tile(const transport::DeviceWaiter& waiter, std::uint64_t epoch, int first,
                         int rows) {
        if (rows > 0 && thread_ % 32 == 0) wait_for_tokens(args_, waiter, epoch, first, rows);
        // The start of each row, in 16 bytes; the lowest bit: in `a`, not in the workspace. Registers would
        // be taken from the multipliers.
        __syncwarp();
#pragma unroll
        for (int number = thread_ % 32; number < kTileM / kRowWarps; number += 32) {
            const int row = number / kEach * kStep + thread_ / 32 * kEach + number % kEach;
            starts_[row] = row < rows ? start_of(first + row) : 0;
        }
        __syncwarp();
        const int mine = (rows - thread_ / kChunks + kStep - 1) / kStep;  // may be negative
        const int steps = (args_.k + kStepK<In> - 1) / kStepK<In>;
        const char* const there = args_.workspace.data(args_.workspace.rank);
        for (int step = 0; step < steps; ++step, cursor_.next()) {
            shared_.empty[cursor_.slot].wait(cursor_.parity ^ 1);
            const int byte = (step * kChunks + thread_ % kChunks) * 16;
            const bool is_there = byte < args_.k * static_cast<int>(sizeof(In));
            // Zeros come from the row's first bytes, of which none are read.
            const std::uint32_t nbytes = is_there ? 16 : 0;
            const std::int64_t at = is_there ? byte : 0;
            std::uint32_t to = ptx::shared_address(shared_.stages[cursor_.slot]) +
                               thread_ / kChunks * 128 +
                               ((thread_ % kChunks) ^ (thread_ / kChunks % 8)) * 16;
#pragma unroll
            for (int i = 0; i < kRows; ++i, to += kStep * 128) {
                if (i >= mine) continue;
                const std::uint32_t start = starts_[thread_ / kChunks + i * kStep];
                const char* const base = (start & 1) != 0 ? args_.a : there;
                const char* const from = base + std::uint64_t{start / 2} * 16;
                ptx::copy_16(to, from + at, nbytes);
                if constexpr (C::kStageScales > 0) {
                    if (i % kChunks == thread_ % kChunks) {  // one of those that copy the row
                        ptx::copy_4(&shared_.stage_scales[cursor_.slot * C::kStageScales +
                                                          thread_ / kChunks + i * kStep],
                                    from + args_.k + step * sizeof(float));
                    }
                }
            }
            ptx::close_copies();
            if (open_ < kOpen) {
                ++open_;
            } else {
                ptx::wait_copies<kOpen>();
                arrive();
            }
        }
    }

    // Ends the gathering, after the last tile.
    __device__ void finish() {
        ptx::wait_copies<0>();
        for (; open_ > 0; --open_) arrive();
    }

  private:
    static constexpr int kChunks = 8;                       // of 16 bytes, of a row
    static constexpr int kStep = kRowWarps * 32 / kChunks;  // a multiple of 8: see `to`
    static constexpr int kEach = 32 / kChunks;              // rows of a step that are one warp's
    static constexpr int kRows = kTileM / kStep;            // of one thread
    static constexpr int kOpen = C::kStages - 2;            // stages whose copies are under way
    static_assert(kStep % 8 == 0 && kOpen > 0);

    __device__ std::uint32_t start_of(int row) const {
        const TokenPlace place = token_place(args_, row);
        const auto each = static_cast<std::uint32_t>(args_.row_bytes / 16);
        return static_cast<std::uint32_t>(place.number) * each * 2 + (place.own ? 1 : 0);
    }

    // Arrives at the oldest stage whose copies were under way, which is filled.
    __device__ void arrive() {
        ptx::fence_async_shared();
        __syncwarp();
        if (thread_ % 32 == 0) shared_.full[oldest_.slot].arrive();
        oldest_.next();
    }

    Shared<C>& shared_;
    const GroupedArgs& args_;
    std::uint32_t* starts_;
    int thread_;
    int open_ = 0;
    Cursor<C::kStages> cursor_, oldest_;
};

}  // namespace mkernel::hopper::moe
