// The storing of results from the slices: one warp of the block.
#pragma once

#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/moe/parts.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper::moe {

// Returns where results of a row go.
__device__ inline char* result_of(const GroupedArgs& args, int row, int element_bytes) {
    const std::int64_t row_bytes = std::int64_t{args.n} * element_bytes;
    if (!args.home) return args.out + row * row_bytes;
    const int own = args.tables.tokens * args.tables.top_k;
    const int place = args.tables.row_place()[row];
    const int rank = args.keeps ? args.workspace.rank : place / own;
    return args.workspace.data(rank) + place % own * row_bytes;
}

// The storer of slices, of elements of so many bytes.
template <class C, int kBytes>
class RowStorer {
  public:
    __device__ RowStorer(Shared<C>& shared, const GroupedArgs& args)
        : shared_(shared), args_(args), lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void part(const Part& part, int slices) {
        // The next expert's rows follow the last one, so a box has only rows of this part.
        const int boxed = args_.home ? 0 : part.rows / kBoxRows * kBoxRows;
        for (int number = 0; number < slices; ++number, cursor_.next()) {
            shared_.written[cursor_.slot].wait(cursor_.parity);
            const unsigned char* slice = shared_.slices[cursor_.slot];
            const int column = part.column + number * kColumns;
            if (lane_ == 0) {
                for (int row = 0; row < boxed; row += kBoxRows) {
                    ptx::store_box(&args_.results, slice + row * 128, column, part.first + row, 0);
                }
                ptx::close_group();
            }
            store_rows(part, slice, column + lane_ % 8 * (16 / kBytes), boxed);
            __syncwarp();
            if (lane_ == 0) drain(number > 0);
            before_ = cursor_.slot;
        }
        if (lane_ == 0) {
            ptx::wait_groups_read<0>();
            shared_.drained[before_].arrive();
        }
    }

    // Waits until all parts so far are in memory.
    __device__ void finish() {
        if (lane_ == 0) {
            ptx::wait_groups<0>();
            ptx::fence_async_proxy();
        }
        __syncwarp();
        transport::fence_system();
    }

  private:
    static constexpr int kColumns = kSliceN * kElementBytes / kBytes;  // of a slice

    __device__ void store_rows(const Part& part, const unsigned char* slice, int column,
                               int first) const {
        if (column >= args_.n) return;
        const int chunk = lane_ % 8;
#pragma unroll 4
        for (int row = first + lane_ / 8; row < part.rows; row += 4) {
            const uint4 found =
                *reinterpret_cast<const uint4*>(slice + row * 128 + (chunk ^ (row % 8)) * 16);
            ptx::store_16(result_of(args_, part.first + row, kBytes) + column * kBytes, found);
        }
    }

    // Frees the previous slice once its boxes have been read.
    __device__ void drain(bool any_before) {
        if (!any_before) return;
        ptx::wait_groups_read<1>();
        shared_.drained[before_].arrive();
    }

    Shared<C>& shared_;
    const GroupedArgs& args_;
    int lane_;
    int before_ = 0;
    Cursor<C::kSliceSlots> cursor_;
};

// Writes zeros into rows of `out`, of elements of so many bytes, that have no place, and scales of 1. Called by one
// warp of each block.
template <int kBytes>
__device__ inline void zero_rest(const GroupedArgs& args) {
    const std::int64_t row_bytes = std::int64_t{args.n} * kBytes;
    const std::int64_t end = args.height * row_bytes;
    const std::int64_t step = std::int64_t{gridDim.x} * 512;
    for (std::int64_t at =
             args.tables.rows() * row_bytes + blockIdx.x * 512 + threadIdx.x % 32 * 16;
         at < end; at += step) {
        *reinterpret_cast<uint4*>(args.out + at) = {};
        // A block has 128 bytes, of which one thread has the first ones.
        if constexpr (kBytes == 1) {
            if (at % kScaledBlock == 0) args.out_scales[at / kScaledBlock] = 1;
        }
    }
}

}  // namespace mkernel::hopper::moe
