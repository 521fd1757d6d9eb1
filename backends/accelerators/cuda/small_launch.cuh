// The launch of a kernel that is neither persistent nor in clusters.
#pragma once

#include <cuda_runtime.h>

#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

// Launches on `stream`, of the current device, with `shared` bytes of dynamic shared memory. CudaError names
// `what`.
template <class... Parameters>
void launch_small(const char* what, void (*kernel)(Parameters...), unsigned blocks,
                  unsigned threads, std::size_t shared, cudaStream_t stream,
                  Parameters... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

// Loads a kernel to the current device, which its first launch would otherwise do.
template <class... Parameters>
void load_kernel(void (*kernel)(Parameters...)) {
    cudaFuncAttributes found{};
    check(cudaFuncGetAttributes(&found, kernel), "loading a kernel");
}

}  // namespace mkernel::cuda
