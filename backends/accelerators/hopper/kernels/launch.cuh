// Starts a persistent kernel of tile/block.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "backends/accelerators/cuda/kernels/prepared.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// `tiles`: those of all clusters together. `blocks` 0: one an SM. Never launches more blocks than there is
// work for; `others` of them, whole clusters, have other work than tiles.
template <class C, class Args>
cudaError_t launch_blocks(void (*kernel)(Args), const Args& args, int tiles, int blocks,
                          cudaStream_t stream, int others = 0) {
    int processors = 0;
    const cudaError_t status =
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(Shared<C>), processors);
    if (status != cudaSuccess) return status;
    if (blocks <= 0) blocks = processors;

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    const int clusters = std::min(std::max((blocks - others) / C::kCluster, 1), tiles);
    config.gridDim = clusters * C::kCluster + others;
    config.blockDim = kBlockThreads;
    config.dynamicSmemBytes = sizeof(Shared<C>);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace mkernel::hopper
