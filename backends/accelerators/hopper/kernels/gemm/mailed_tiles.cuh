// GEMM+AllReduce of more rows than few_rows.cuh takes, up to some thousand, whose sums a call's mail can carry:
// tiles of output, each of which leaves for the peers from shared memory as soon as it is finished, while the next
// one is multiplied.
//
// Data flow of a tile on rank r:
//   a, b ──loader──▶ stages ──multipliers──▶ rounded, slices of 64 columns in shared memory
//   slices ──carriers──▶ the mail of every peer (device/mailbox.cuh)
//   own slice, and mail of the peers ──carriers──▶ added in the order of ranks in float32, + bias, rounded ──▶ out
// A slice stays where it is until its mail has come; the multipliers go on as long as slots of the ring are free.
// Three warps carry. They send a slice before they wait for the one before it. A rank has mail from each peer:
// from rank s it is slot (s - r - 1) mod W.
//
// Sums of ranks start from +0 and go from rank 0 to the last one everywhere, so the bits are the same on all ranks.
// The call is brief (device/call.cuh). No rank waits for ever: clusters take tiles in rising order, the same on all
// ranks, so the first slice that has not come anywhere waits for no other.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/kernels/gemm/few_rows.cuh"
#include "backends/accelerators/hopper/tile/raster.cuh"

namespace mkernel::hopper {

inline constexpr int kMailedRows = 128;  // of a block's tile, and of a whole box of `a`

// Launches on at most `blocks` blocks. `args`: boxes of `a` are [kMailedRows, 64] and those of `b` the tiling's; there are
// neither scales nor a norm, and sums are rounded. Element, also the type of operands: __nv_bfloat16 or __half.
template <class Element>
cudaError_t launch_mailed_tiles(const FewRowsArgs& args, GemmVariant variant, int blocks,
                                cudaStream_t stream);

}  // namespace mkernel::hopper
