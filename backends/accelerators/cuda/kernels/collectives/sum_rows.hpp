// AllReduce of rows in memory, with mail as its exchange (device/mailbox.cuh), and RMSNorm of rows.
//
//   sum_rows   x ──▶ the mail of every peer; own x, and mail of the peers ──▶ added in the order of ranks in
//              float32 ──▶ out; or, with a norm, + residual ──▶ r ──▶ residual_out, normalised rows ──▶ out
//   twice      rows that rank p owns ──▶ the mail of rank p; own x, and mail of the peers ──▶ added there, itself
//              first and then the ranks behind it ──▶ rounded ──▶ the mail of every peer. Each rank normalises all
//              rows as their sums come, as above
//   norm_rows  rows that any other kernel summed, + residual ──▶ r ──▶ residual_out, normalised rows ──▶ out
//
// r / sqrt(mean(r^2) + eps) * weight, in float32; r and the result are rounded once each. Where rows are wanted in
// e4m3, the rounded result is quantised (kernels/e4m3.cuh), each row by a scale of its own; then `out` need not be there,
// except for norm_rows, which leaves the rounded rows in it. A block has whole rows, so the block that summed a row, or
// took its sum, normalises it. Residual and weight are loaded before the wait for the sum. Sums start from +0 and go
// from rank 0 to the last one everywhere, or are made by one rank, and those of squares go over threads in a fixed
// order: results are the same bits on all ranks, and always the same.
//
// sum_rows is brief (device/call.cuh): each rank waits for all that its peers write into its memory. A block
// sends its next row before it waits for this one (and takes the sum of the row before), and waits only for the
// peers' block of the same number, since all ranks have as many: so no rank waits for ever.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/collectives/row_norm.hpp"
#include "backends/accelerators/cuda/kernels/prefetch.hpp"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda {

// The rows, of 16-bit elements: bfloat16, or `half` float16. `columns` is a multiple of 8.
struct RowsOfSums {
    const void* from;
    void* out;  // may be `from`
    std::uint32_t rows, columns;
    bool half;
    RowNorm norm;
    std::uint32_t
        blocks;  // multiprocessors whose blocks there are at most; 0: all. The same on all ranks
    bool twice = false;      // by two exchanges; there is a norm
    bool unrounded = false;  // `from` are float32 terms, in one exchange
    bool tree = false;  // added by the tree of invariant results (ordered_sum.cuh), in one exchange
    Prefetch prefetch{};  // while they are summed
};

// Rows that sum_rows normalises lie in shared memory, unrounded.
inline constexpr std::uint32_t kMostNormedColumns = 48u << 10;

// Throws std::length_error where ranks send more mail than a call may have, or rows are too long.
void check_sum_rows(int world, const RowsOfSums& sums);

// `from`: this rank's terms.
void sum_rows(const Workspace& workspace, const transport::WaitLimits& limits,
              const RowsOfSums& sums, cudaStream_t stream);

// `from`: the sums. On this rank alone; there is a norm.
void norm_rows(const RowsOfSums& sums, cudaStream_t stream);

// Both are stream-ordered on the current device's `stream`, and may be captured. std::invalid_argument;
// CudaError.

}  // namespace mkernel::cuda
