// Attention by one kernel: out = softmax(scale q kᵀ) v of some queries and keys, and the log-sum-exp of their scores.
//
// Rows are 64 or 128 elements wide. Products are of 16-bit elements with sums in float32; a weight e^(score - the largest so far) is rounded
// to the element type before it multiplies v, sums of weights are not; out is rounded once.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/kernels/attention/parts.hpp"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper::attention {

inline constexpr int kCoreWidth =
    128;  // of the kernel for parts, whose times for 64 the library's beat

struct Core {
    Rows q, out;  // [batch, heads, queries, width]
    Rows k, v;    // [batch, kv_heads, keys, width]; heads is a multiple of kv_heads
    float* lse;   // [batch, heads, queries], packed
    // Two words of device memory, zero before the first launch; every launch leaves them zero. Launches that
    // may run at the same time have words of their own.
    std::uint32_t* counters;
    std::int32_t batch, heads, kv_heads, queries, keys, width;
    float scale;
    bool causal;  // query i sees keys 0 to i; as many queries as keys
    bool half;    // float16, else bfloat16
};

// Queues attention on the current device's `stream`; may be captured. CudaError; std::invalid_argument.
void attend(const Core& core, cudaStream_t stream);

inline constexpr int kCoreRows = 128;  // queries of a tile
inline constexpr int kCoreKeys = 128;  // keys of a step

// The kernel's arguments.
struct CoreArgs {
    CUtensorMap q, k, v, out;  // boxes of 64 elements by 64 rows, or kCoreKeys
    float* lse;
    std::uint32_t* counters;  // tiles that were taken, blocks that have ended
    std::int32_t heads, kv_heads, queries, keys, width;
    std::int32_t tiles;  // in all
    std::int32_t tiles_of_head;
    std::int32_t section;  // heads whose tiles of equal rows follow each other
    float scale, scale_log2;
};

void launch_core(const CoreArgs& args, bool causal, bool half, cudaStream_t stream);

}  // namespace mkernel::hopper::attention
