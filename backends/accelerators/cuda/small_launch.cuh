// The launch of a kernel that is neither persistent nor in clusters.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

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

// Loads a kernel to the current device, which its first launch would otherwise do, and returns its attributes there.
template <class... Parameters>
cudaFuncAttributes load_kernel(void (*kernel)(Parameters...)) {
    cudaFuncAttributes found{};
    check(cudaFuncGetAttributes(&found, kernel), "loading a kernel");
    return found;
}

// The compute capabilities that kernels are compiled for, times 100.
inline constexpr int kBuiltFor[] = {__CUDA_ARCH_LIST__};
inline constexpr bool kAllSinceHopper = std::ranges::min(kBuiltFor) >= 900;

// Returns true where the current device runs code of the kernel that was compiled for compute capability 9.0 or later
// (ptx/since_hopper.cuh).
template <class... Parameters>
bool since_hopper(void (*kernel)(Parameters...)) {
    if constexpr (kAllSinceHopper) {
        return true;
    } else {
        return load_kernel(kernel).ptxVersion >= 90;
    }
}

}  // namespace mkernel::cuda
