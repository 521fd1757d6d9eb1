// Own tokens on their way to the ranks that want them: the other way than copies of all of them, where most
// tokens are wanted by few ranks.
//
// Data flow of one call on rank r:
//   topk_ids (own) ──one warp a token──▶ which ranks have an expert of it
//   row of x ──that warp, read once──▶ its place in the workspace of each of them, [W, tokens, hidden] there
//   when all are written: flag r of every rank of this node
// A place that no rank writes is none that rows of that rank lead to, so nobody reads it. The own ids say all
// that is needed: the kernel waits for nobody, and may run beside the routing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/hopper/device/workspace.cuh"

namespace mkernel::hopper::moe {

struct PushArgs {
    Workspace workspace;
    const char* x;                        // own tokens, [tokens, row_bytes]
    const std::int32_t* ids;              // own, [tokens, top_k]
    std::int64_t row_bytes;               // a multiple of 16
    std::int32_t tokens, top_k, experts;  // experts: of one rank
};

// On `blocks` blocks, an even number, of the current device's `stream`; may be captured. CudaError.
void push_wanted(const PushArgs& args, std::uint32_t blocks, cudaStream_t stream);

}  // namespace mkernel::hopper::moe
