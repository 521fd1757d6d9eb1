// Starts a persistent kernel of tile/block.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// `tiles`: of all clusters together. `blocks` 0: one an SM. Never more blocks than there is work for;
// `others` of them, whole clusters, have other work than tiles.
template <class C, class Args>
cudaError_t launch_blocks(void (*kernel)(Args), const Args& args, int tiles, int blocks,
                          cudaStream_t stream, int others = 0) {
    int device = 0;
    int processors = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (status == cudaSuccess) {
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sizeof(Shared<C>)));
    }
    if (status != cudaSuccess) return status;
    if (blocks <= 0) blocks = processors;

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim =
        std::min(std::max((blocks - others) / C::kCluster, 1), tiles) * C::kCluster + others;
    config.blockDim = kBlockThreads;
    config.dynamicSmemBytes = sizeof(Shared<C>);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace mkernel::hopper
