// The grouped product of MoE: rows of an expert @ its weight [K, N], for all experts of a rank at once.
//
// Data flow of one call, on clusters of two blocks that take tiles of the routing's table in turn:
//   rows of A ──▶ stages, in one of three ways:
//        gathered  tokens, two warps, 16 bytes a copy: of this rank's x, or, once flag s signals that they
//                  are there, of rank s's rows in the workspace. No byte moves twice: few tokens
//        permuted  the same tokens, two warps of all blocks ──▶ `permuted`, in the order of rows, ahead of
//                  the tiles ──loader, boxes──▶ stages: many tokens
//        ready     rows that are in order already ──loader, boxes──▶ stages
//   weights ──loader, 3-D boxes──▶ stages
//   stages ──multipliers──▶ slices ──storer's warp, boxes, the last few rows one by one──▶ `out`; or, with
//        `home`, row by row ──▶ the place of that row in its rank's workspace: [tokens, top_k, N] there
// e4m3 operands have scales by blocks of 128: those of rows lie behind each row, or by themselves, those of
// weights by expert. Each comes with its stage, and what a stage gives is scaled as it is added. Quantised, results
// leave as e4m3, one block of columns at a time, with scales.
// Gated, weights are [K, 2N]: a tile has the gate's and the up columns of the same results, each half
// its width, and what leaves is silu(gate) * up.
// A tile has up to 256 rows of one expert. With more than 128 each block of the cluster has half of them
// and loads half of the weight's columns for both; else both have all of the rows, and each has columns of
// its own. A warpgroup none of whose 64 rows exist multiplies nothing. At the end: without `home` the call is
// over (device/call.cuh), once all ranks' tokens have come, also those that no row needed, and of a routing
// that was refused; with it, flag `W + r` of every rank signals that this rank's rows are there, and the call
// goes on in the next kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing_lists.hpp"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper::moe {

inline constexpr int kBoxRows = 32;  // of A, and of results

struct GroupedArgs {
    CUtensorMap b;        // [experts, K, N], or [experts, N, K]; gated, of 2N
    CUtensorMap rows;     // not gathered: [rows, K]
    CUtensorMap results;  // `out`, where it is not wide: [1, rows, N]
    Workspace workspace;
    transport::WaitLimits limits;
    Tables tables;
    Crossing crossing;
    const char* a;  // own tokens [tokens, row_bytes]; of rows that are ready, none
    char*
        permuted;  // [rows, row_bytes], which is what `rows` describes; null: rows are ready, or gathered
    char* out;                  // [rows, N]; unused with `home`
    std::int64_t row_bytes;     // from a token to the next one, a multiple of 16
    const float* row_scales;    // of e4m3 rows that are not gathered, of the first row
    std::int64_t scales_a_row;  // from those of a row to those of the next one
    const float* b_scales;      // [experts, columns / 128, K / 128], rounded up
    float* out_scales;          // of quantised results: [rows, N / 128]
    std::int32_t n, k;
    std::int32_t height;  // rows of `out` that have no place are zeroed, up to here; 0: none are
    bool waits;           // for tokens of other ranks
    bool home;
    bool keeps;  // nothing goes to other ranks: with `home`, all rows go to the own workspace
    bool ends;   // the call, or tells the others; else the next kernel does
};

// `wide`: results are float32; the product is neither gathered nor gated. `deep`: stages rather than slices
// (tile/block.cuh); always set where rows are gathered. `quantised`: results are e4m3; the others of e4m3
// operands, which have one tiling, and weights that are not N-major, are as of 16-bit ones.
struct GroupedVariant {
    bool n_major_b, gathers, gated, wide, deep, quantised;
};

// Launches on `blocks` blocks, an even number. Element: __nv_bfloat16 or __half.
template <class Element>
cudaError_t launch_grouped(const GroupedArgs& args, GroupedVariant variant, int blocks,
                           cudaStream_t stream);

// Does the same with e4m3 operands. Results that are float32 or quantised are __nv_bfloat16's.
template <class Element>
cudaError_t launch_grouped_e4m3(const GroupedArgs& args, GroupedVariant variant, int blocks,
                                cudaStream_t stream);

// Loads all variants of 16-bit operands to the current device (host/moe/ops.hpp: load).
template <class Element>
void load_grouped();

}  // namespace mkernel::hopper::moe
