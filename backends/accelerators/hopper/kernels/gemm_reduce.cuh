// GEMM+ReduceScatter and GEMM+AllReduce: sums over ranks of a @ b, each tile summed by its owner.
//
// Rank o owns rows [o * rows, (o + 1) * rows) of the M of the sum. Data flow of one call on rank r:
//   a, b ──▶ tiles of the other owners' rows, r + 1's first ──storer──▶ rounded, into the slot of
//            source r in the owner's region; then the tile's flag there is set to the epoch
//   a, b ──▶ tiles of the own rows, last; a tile stays in registers, and the slots of sources r + 1,
//            r + 2, ... are added in that order, in float32, as their flags come ──▶ rounded once,
//            into out; AllReduce: into every rank's out
// Sends are spread over the whole call: the columns are cut into bands, and the own tiles of a band
// are computed after the other owners' tiles of the next. The link still carries a wave of tiles more
// slowly than the SMs produce it, so each block sends at a pace.
// Slot of source s at owner o: (s - o - 1) mod W. Flag of a tile: slot * tiles of an owner + its
// number, row-major.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/hopper/device/host_control.hpp"
#include "backends/accelerators/hopper/device/region.cuh"
#include "backends/accelerators/hopper/kernels/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/tile/raster.cuh"

namespace mkernel::hopper {

struct GemmReduceArgs {
    CUtensorMap a;  // [M, K]
    CUtensorMap b;
    CUtensorMap own_slots;         // [W - 1, rows, N] in the own region, to load from
    CUtensorMap slots[kMaxRanks];  // the same of owner o, to store to, kTrickleRows rows at a time
    CUtensorMap out;               // where the own tiles go, [1, ..., N]
    CUtensorMap outs[kMaxRanks];   // every rank's, the own first; kTrickleRows rows at a time
    const void* bias;              // [N], added once, by the owner; or null
    Region region;
    Patience patience;
    Raster raster;     // of an owner's rows and all columns
    int band_columns;  // tile columns of a band
    int pace;          // least clock cycles from one put of kTrickleRows rows to the next
    int rows, n, k;
    int out_count;  // 1, or as many as ranks
    int out_row;    // the row of the outs where the own rows begin
    bool alone;     // exchange nothing: neither put nor add; for timing the products alone
};

// Launches on `blocks` blocks (0: one an SM). Element: __nv_bfloat16 or __half.
template <class Element>
cudaError_t launch_gemm_reduce(const GemmReduceArgs& args, GemmVariant variant, int blocks,
                               cudaStream_t stream);

}  // namespace mkernel::hopper
