// GEMM+AllReduce and GEMM+ReduceScatter of few rows, up to 128: reading the weights takes the time, so all
// multiprocessors read them.
//
// Weights are the rows of the product here: wgmma multiplies b^T [n, k] by a^T [k, m]. A tile is 128 columns of b
// and all of m. The blocks of a cluster share a tile, each with its part of K, so that as many blocks
// load as there are multiprocessors. Data flow of a tile on rank r:
//   a, b ──loader──▶ stages ──multipliers──▶ this block's partial sums, float32, in its shared memory
//   partial sums of the cluster's blocks ──▶ each block adds a part of the tile in the order of K
//   AllReduce: its sums, rounded or not ──▶ the mail of every peer (device/mailbox.cuh)
//   ReduceScatter: those of a rank's rows ──▶ that rank's mail
//   own sums, and mail of the peers ──▶ added in the order of ranks in float32, + bias, rounded ──▶ out
// With e4m3 operands a rank's sums are multiplied by its scales before they are rounded and before they
// travel. Sums of ranks start from +0 and go from rank 0 to the last one everywhere, so the bits are the same
// on all ranks, and always the same. Mail shows by itself that it has arrived, so no flag is raised after it
// and no fence is needed: it takes one way across the link.
//
// The call is brief (device/call.cuh): each rank waits for all that its peers write into its memory.
// All blocks read the epoch at their begin, and the last one that did moves it on.
// No rank waits for ever: clusters take tiles in rising order and send before they wait, so the first tile
// that is not done anywhere waits for no other.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/prefetch.hpp"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/boxes.cuh"
#include "backends/accelerators/hopper/tile/operand_scales.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

inline constexpr int kMostFewRows = 128;
inline constexpr int kMostSplits = 8;  // of K: blocks of a cluster
inline constexpr int kFewColumns = 128;
inline constexpr int kFewDepthBytes = 128;  // of a row of K, of a stage

enum class FewRowsExchange : std::uint8_t { all_reduce, reduce_scatter };

struct FewRowsArgs {
    Boxes a;               // [m, k], boxes [m, 128 bytes of k]
    Boxes b;               // boxes [128 of n, 128 bytes of k], or N-major [64 of k, 64 of n]
    const void* bias;      // [n], or null
    OperandScales scales;  // of e4m3 operands, not by blocks
    void* out;             // [m, n]; of ReduceScatter [rows, n]
    Workspace workspace;
    transport::WaitLimits limits;
    std::uint64_t slot;  // bytes of mail from one rank
    int m, n, k;
    int rows;  // of out
    FewRowsExchange exchange;
    bool unrounded;  // float32 sums travel
    Prefetch prefetch;
};

// Returns the rows of the kernel which runs m rows, a multiple of 16.
int few_rows_height(int m);

// Launches on at most `blocks` blocks, in clusters of `splits`. Element, the type of results: __nv_bfloat16
// or __half. In, the type of operands: the same, or __nv_fp8_e4m3 with scales, with b K-major.
template <class Element, class In>
cudaError_t launch_few_rows(const FewRowsArgs& args, bool n_major, int splits, int blocks,
                            cudaStream_t stream);

}  // namespace mkernel::hopper
