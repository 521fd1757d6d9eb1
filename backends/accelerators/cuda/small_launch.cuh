// The launch of a kernel that is neither persistent nor in clusters.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>

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

// Returns true where the current device runs code of the kernel that was compiled for compute capability 9.0 or later
// (ptx/since_hopper.cuh). All kernels are compiled for the same architectures, so the first one that is queried answers for
// the others.
template <class... Parameters>
bool since_hopper(void (*kernel)(Parameters...)) {
    static std::array<std::atomic<signed char>, 64> known;  // by device; 0: not yet
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    std::atomic<signed char>& found = known.at(static_cast<std::size_t>(device));
    if (found == 0) found = load_kernel(kernel).ptxVersion >= 90 ? 1 : -1;
    return found > 0;
}

}  // namespace mkernel::cuda
