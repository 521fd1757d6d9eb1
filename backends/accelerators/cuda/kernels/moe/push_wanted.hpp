// Own tokens on their way to the ranks that want them: the alternative to copying all of them, where most
// tokens are wanted by few ranks.
//
// Data flow of one call on rank r:
//   topk_ids (own) ──one warp a token──▶ which ranks have an expert of it
//   row of x ──that warp, read once──▶ its place in the workspace of each of them, [W, tokens, hidden] there
//   when all are written: flag r of every rank of this node
// No row of a rank leads to a place that is not written there, so nobody reads it. The own ids are all that
// is needed: the kernel waits for no rank, and may run beside the routing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"

namespace mkernel::cuda::moe {

struct PushArgs {
    Workspace workspace;
    const char* x;                        // own tokens, [tokens, row_bytes]
    const std::int32_t* ids;              // own, [tokens, top_k]
    std::int64_t row_bytes;               // a multiple of 16
    std::int32_t tokens, top_k, experts;  // experts: of one rank
};

// Pushes on `blocks` blocks, an even number, of the current device's `stream`; may be captured. CudaError.
void push_wanted(const PushArgs& args, std::uint32_t blocks, cudaStream_t stream);

}  // namespace mkernel::cuda::moe
