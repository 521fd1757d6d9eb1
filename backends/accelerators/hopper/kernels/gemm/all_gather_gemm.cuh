// AllGather+GEMM, and with one rank a plain GEMM: C [M, N] = concat(a over ranks) @ b (+ bias).
//
// Data flow of one call on rank r:
//   a (own rows) ──copy engine, or the first `push_blocks` blocks──▶ rows r of every peer's workspace,
//            chunk by chunk, rank r - 1 first; after each chunk its flag there is set to the epoch.
//            Where copies take about as long as the product, the last peer gets its chunk in slices of
//            K, each with a flag: tiles begin with the first and need not wait for the last
//   own a, b ──loader──▶ tiles of the own rows, at once
//   workspace  ──loader──▶ tiles of rank r + 1's rows, then r + 2's, ...: as soon as the flags of the
//                        chunks that a tile's rows lie in hold the epoch
//   tiles    ──storer──▶ out
// Between nodes the pushing blocks also send:
//   a (own rows) ──loader──▶ own area ──NIC──▶ rows r of the area of every rank of another node; there
//   the arrivals ──multipliers of block 0──▶ flags; or, where the area is staged in host memory,
//   area ──storer──▶ rows s of the workspace, and their flag
// Hierarchically rows go by the NIC to one rank of every other node only, which has the same place in it
// (device/rails.cuh). It is the *relay* of its node: its storers wait for a chunk as above and write it,
// with its flag, into the workspaces of all ranks of the node.
//
// No rank waits for ever. A pushing block waits for no block that has tiles: its loader waits for slots of
// the FIFO alone, its multipliers for loaders of pushing blocks of other nodes, its storer for those two.
// Data from another node is therefore passed on whatever tiles the ranks of the node wait for.
// Slice i of chunk c of rank s has flag (s * chunks + c) * slices + i. Copy engines take no SM but start late;
// blocks start at once and publish small chunks.
// With e4m3 operands a tile's sums are multiplied by their scales in registers, before the bias is added and
// before they are rounded. The scales of a rank's rows travel ahead of a chunk's flag, into the workspace
// after all rows (`gathered_scales_at`).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/boxes.cuh"
#include "backends/accelerators/hopper/tile/operand_scales.cuh"
#include "backends/accelerators/hopper/tile/raster.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

struct AllGatherGemmArgs {
    Boxes own;       // a [rows, K]
    Boxes gathered;  // [W * rows, K] in the workspace; the own rows are never read there
    Boxes b;
    CUtensorMap out;   // [W, rows, N]; of segments [segments, rows, N]
    const void* bias;  // [N], of the element type; or null
    OperandScales scales;
    Workspace workspace;
    transport::WaitLimits limits;
    Raster raster;  // of one rank's rows; no tiles: the pushing blocks alone, whose call goes on
    int rows, n, k;
    int chunk_rows, chunks;  // of one rank's rows; chunks 0: wait for nothing
    int slices;              // of K, each with a flag; 1 where blocks push
    int segments;            // of K, with sums of their own; 1 where W > 1
    int levels;  // of the tree in registers over 2^levels parts of each, whole steps all
    const char* rows_to_push;  // a, where blocks push; multiples of 16 bytes
    int push_blocks;           // of a whole number of clusters; 0: the copy engine does it
    Rails rails;
};

// Returns where scales of e4m3 rows lie in the data area, after so many bytes of rows.
inline std::uint64_t gathered_scales_at(std::uint64_t row_bytes) {
    return (row_bytes + 127) / 128 * 128;
}

// Returns the columns of A in a slice, 16 bits each: whole steps of 64, except perhaps in the last slice.
__host__ __device__ inline int slice_columns(int k, int slices) {
    return ((k + 63) / 64 + slices - 1) / slices * 64;
}

// The choice among the compiled kernels: see tile/block.cuh; b is [K, N] row-major. `promoted`: for e4m3
// operands. `deep`: of plans of earlier versions, and the same kernel as `wide`.
enum class Tiling : std::uint8_t { wide, medium, deep, narrow, promoted };
struct GemmVariant {
    Tiling tiling;
    bool n_major_b;
};

// Launches on `blocks` blocks (0: one an SM), those that push included. Element, the type of results:
// __nv_bfloat16 or __half. In, the type of operands: the same, or __nv_fp8_e4m3 with scales, with b K-major
// and all ranks on one node.
// The levels of 16-bit operands: 0; or 1 for Tiling::wide, 2 for medium and narrow.
template <class Element, class In>
cudaError_t launch_all_gather_gemm(const AllGatherGemmArgs& args, GemmVariant variant, int blocks,
                                   cudaStream_t stream);

}  // namespace mkernel::hopper
