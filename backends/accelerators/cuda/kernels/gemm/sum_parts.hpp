// The sum of ranks' partial results that have come home, after a library's products.
//
// Sums are float32, in the order of the parts or by the tree, then the bias, rounded once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"

namespace mkernel::cuda::collectives {

// `count` arrays of as many `elements` each, in the order in which they are added, and the place of the sum.
struct Parts {
    const void* at[kMaxRanks];
    int count;
    std::uint64_t elements;
    void* out;
    bool tree = false;  // of invariant results (ordered_sum.cuh): `count` is a power of two
};

// Loads the kernels here to the current device (host/gemm/parts.hpp: load_parts).
void load_sum_parts();

// Sums on at most `blocks` blocks. `ends`: it also ends the call (device/call.cuh). With a bias, `elements`
// are whole rows. Queued on the current device's `stream`; may be captured. std::invalid_argument; CudaError.
void sum_parts(const Workspace& workspace, const transport::WaitLimits& limits, Element element,
               const Parts& parts, const Bias& bias, std::uint32_t blocks, bool ends,
               cudaStream_t stream);

}  // namespace mkernel::cuda::collectives
