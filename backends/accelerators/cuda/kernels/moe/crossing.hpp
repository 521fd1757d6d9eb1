// Tokens that cross between nodes, in pieces of lists (crossing_lists.hpp).
//
// Data flow of one call on rank r, whose peers are all ranks of other nodes, or hierarchically those of its rail
// (device/rails.cuh):
//   own ids ──put──▶ every peer; own ids ──a block a peer──▶ the list of own tokens for it
//   row of x ──a warp a row──▶ the outbox, [peers, tokens, row_bytes]; a piece that is written ──put──▶ slot r of the
//        peer. Each piece is signalled, also an empty one
//   ids of a peer ──its word──▶ hierarchically every rank of this node, then flag W + s there
//   ids of all ranks of other nodes ──a block a rank──▶ their lists, then the listed flag, which the routing waits for
//   piece p of a peer s ──its word; all blocks, a warp a row──▶ where areas are staged, slot s of the own data area;
//        hierarchically slot s of each rank of this node that wants the token, at the same place; then flag(s, p) there
// The kernel that lands runs until everything has come. All its blocks run before the routing ends, since each has
// counted itself when the listed flag is set; so what starts after the routing may take all other multiprocessors.
// No size comes from the host but those of the call's tensors, so a graph may replay it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing_lists.hpp"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::moe {

struct CrossingArgs {
    Workspace workspace;
    transport::WaitLimits limits;
    Crossing crossing;
    const char* x;                        // own tokens, [tokens, row_bytes]
    const std::int32_t* ids;              // own, [tokens, top_k]
    std::uint64_t ids_offset;             // of [W, tokens, top_k] in the data area
    std::uint64_t outbox_offset;          // in the area for NICs
    std::int64_t row_bytes;               // a multiple of 16
    std::int32_t tokens, top_k, experts;  // experts: of one rank
    bool hierarchical;
};

// Both queue on the current device's `stream`, after the end of the previous call; may be captured. CudaError;
// std::invalid_argument. Landing takes an even number of blocks, and comes after the puts.
void put_tokens(const CrossingArgs& args, cudaStream_t stream);
void land_tokens(const CrossingArgs& args, std::uint32_t blocks, cudaStream_t stream);

// Loads the kernels to the current device (host/moe/ops.hpp: load).
void load_crossing();

}  // namespace mkernel::cuda::moe
