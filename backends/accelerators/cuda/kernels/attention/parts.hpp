// The steps between the calls of a library's attention: the wait for a peer's data, and the kernels that make
// one result of the calls' results.
//
// Forward. Queries q see the keys in parts p, a call each: out_p, and lse_p, the log-sum-exp of the part's scores. Then
//   lse = log sum_p e^lse_p,  out = sum_p e^(lse_p - lse) out_p,
// in float32, in the order of the parts; out is rounded once more. Where parts are more than memory holds,
// the result so far is kept in float32 and counts as the first part of the next merge. Source: Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018.
//
// Backward. Every call gets the result and the log-sum-exp of all keys, so that the parts' contributions to a
// gradient are added up, in float32, in the order of the parts, and rounded once more.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::attention {

// A tensor [batch, heads, rows, width] of 16-bit elements; those of a row are packed. Strides in elements,
// all but the last one's. Addresses and strides are multiples of 16 bytes.
struct Rows {
    void* at;
    std::int64_t batch, head, row;
};

// The result of the queries from `first` on for some keys: `out` [batch, heads, rows - first, width], `lse`
// of the same without the width, packed.
struct Part {
    Rows out;
    const float* lse;
    std::int32_t first;
};

// The earlier result of the same queries: `out` [batch, heads, rows, width], `lse` [batch, heads, rows],
// packed.
struct Running {
    float* out;
    float* lse;
    bool read;   // comes before the parts
    bool write;  // takes the result, instead of Merge::out and Merge::lse
};

struct Merge {
    Part parts[kMaxRanks];
    std::int32_t
        count;  // of them, in the order in which they are added; the first one, or what was
                // found before, has all rows
    Rows out;
    float* lse;              // [batch, heads, rows]
    std::int64_t lse_pitch;  // from a head's first row to the next one's
    std::int32_t batch, heads, rows, width;
    bool half;  // float16, else bfloat16
    Running running;
};

// The contribution of a part to the gradients of rows [first, first + rows): `of` [batch, heads, rows,
// width].
struct Given {
    Rows of;
    std::int32_t first, rows;
};

// A gradient: `factor` times the sum of the contributions to it.
struct Sum {
    Given given[kMaxRanks];
    std::int32_t
        count;  // of them, in the order in which they are added; the first one has all rows
    Rows out;
    std::int32_t heads, rows;
    float factor;
};

inline constexpr int kSums = 3;

struct Sums {
    Sum sums[kSums];  // of q, k and v
    std::int32_t batch, width;
    bool half;
};

// All functions here queue on the current device's `stream`, and may be captured. CudaError;
// std::invalid_argument.

// Makes later work on `stream` wait until those flags of `source`, from `flag` on, are set in the running call, and see what
// was copied before them.
void await_part(const Workspace& workspace, const transport::WaitLimits& limits, int source,
                std::uint32_t flag, cudaStream_t stream, const transport::WordPattern& which = {1});

// Loads all kernels here to the current device, before the first call between nodes (host/moe/ops.hpp: load).
void load();

// Merges, on `blocks` blocks. `ends`: it also ends the call (device/call.cuh).
void merge(const Workspace& workspace, const transport::WaitLimits& limits, const Merge& merge,
           std::uint32_t blocks, bool ends, cudaStream_t stream);

// Sums gradients in the same way.
void sum(const Workspace& workspace, const transport::WaitLimits& limits, const Sums& sums,
         std::uint32_t blocks, bool ends, cudaStream_t stream);

}  // namespace mkernel::cuda::attention
