// The routing, which decides which rank gets which rows: the ids of all ranks, sorted on the device.
//
// Data flow of one call on rank r, one cluster of blocks (one block on devices without clusters), each warp of which
// has a run of one rank's places:
//   topk_ids (own) ──▶ every rank's workspace, then flag W + r there is set to the epoch; of ranks of other
//        nodes both are crossing.hpp's, whose lists are waited for too
//   ids of all ranks ──▶ words of the handle; how many places of each run each expert of r has
//   those counts ──sums over runs, then over experts──▶ the first row of each run and expert
//   ids ──▶ row of each place, place of each row: stable by source, token, slot
//   counts ──one warp──▶ tiles of the grouped product
// Tiles come expert by expert, so that each weight is read once; but up to `early` tiles that need own tokens
// alone come first, while those of other ranks travel: of each expert a multiple of `early_rows`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing_lists.hpp"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::moe {

struct RoutingArgs {
    Workspace workspace;
    transport::WaitLimits limits;
    Tables tables;
    Crossing crossing;
    const std::int32_t* own_ids;  // [tokens, top_k]
    std::uint64_t ids_offset;     // of [W, tokens, top_k] in the data area
    std::uint64_t counts_offset;  // of scratch there, scratch_bytes()
    std::int64_t* counts;         // [experts]
    Report* report;
    std::int32_t capacity;  // of rows, on each rank; 0: any
    std::int32_t early, early_rows;
    bool exchanges;  // else the own ids stand for those of all ranks
};

// Returns the bytes of scratch for so many experts of a rank. std::length_error: too many.
std::uint64_t scratch_bytes(int experts);

// Queues the routing on the current device's `stream`; may be captured. CudaError.
void route(const RoutingArgs& args, cudaStream_t stream);

// Loads the kernel to the current device (host/moe/ops.hpp: load).
void load_routing();

}  // namespace mkernel::cuda::moe
