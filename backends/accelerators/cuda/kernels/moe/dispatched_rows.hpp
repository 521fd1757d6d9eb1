// The dispatch without a product: the rows of this rank's experts, in order.
//
// Data flow of one call on rank r, after the routing, or with the tables of an earlier call:
//   row of `out` ──tables──▶ its token: among the own ones, or, once flag s signals that they are there, of rank s
//        in the workspace
//   token ──one warp a row, 16 bytes a load──▶ `out`, and its scales, where it has some ──▶ `out_scales`
// At the end the call is over (device/call.cuh), once all ranks' tokens have come.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/moe/grouped.cuh"

namespace mkernel::hopper::moe {

// Copies the rows whose product with unit weights `args` describes: `out` is [height, k], `out_scales`
// [height, k / 128] float32 of e4m3 rows, null of 16-bit ones; rows that have no token are zeroed, with scales
// of 1. Weights and maps are not read. Queues `blocks` blocks on the current device's `stream`; may be
// captured. The push of own tokens must not wait for a multiprocessor behind it. CudaError.
void copy_rows(const GroupedArgs& args, std::uint32_t blocks, cudaStream_t stream);

// Loads the kernel to the current device (host/moe/ops.hpp: load).
void load_dispatched_rows();

}  // namespace mkernel::hopper::moe
