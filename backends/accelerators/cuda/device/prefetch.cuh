// The prefetch of a block's share.
#pragma once

#include "backends/accelerators/cuda/kernels/prefetch.hpp"
#include "backends/accelerators/cuda/ptx/bulk.cuh"

namespace mkernel::cuda {

// Requests the block's share, and waits for nothing. Called by one thread of every block.
__device__ inline void prefetch_share(const Prefetch& prefetch) {
    prefetch.for_share(blockIdx.x, gridDim.x, [](std::uint64_t at, std::uint32_t nbytes) {
        ptx::prefetch_bytes(at, nbytes);
    });
}

}  // namespace mkernel::cuda
