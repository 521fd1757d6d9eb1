// The dispatch without a product: the rows of this rank's experts, in order.
//
// Data flow of one call on rank r, after the routing, or with the tables of an earlier call:
//   row of `out` ──tables──▶ its token: among the own ones, or, once flag s signals that they are there, of rank s
//        in the workspace
//   token ──one warp a row, 16 bytes a load──▶ `out`, and its scales, where it has some ──▶ `out_scales`
// At the end the call is over (device/call.cuh), once all ranks' tokens have come.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing_lists.hpp"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::moe {

struct DispatchedArgs {
    Workspace workspace;
    transport::WaitLimits limits;
    Tables tables;
    Crossing crossing;
    const char* a;           // own tokens [tokens, row_bytes]
    char* out;               // [height, width]
    float* scales;           // of e4m3 rows, [height, width / 128]; null: rows have 16 bits
    std::int64_t row_bytes;  // from a token to the next one, a multiple of 16
    std::int32_t width, height;
    bool waits;  // for tokens of other ranks
};

// Copies the rows of this rank's experts; rows that have no token are zeroed, with scales of 1. Queues `blocks`
// blocks on the current device's `stream`; may be captured. The push of own tokens must not wait for a
// multiprocessor behind it. CudaError.
void copy_rows(const DispatchedArgs& args, std::uint32_t blocks, cudaStream_t stream);

// Loads the kernel to the current device (host/moe/ops.hpp: load).
void load_dispatched_rows();

}  // namespace mkernel::cuda::moe
