// Starts a persistent kernel of tile/block.cuh.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// The properties of a device that starting a kernel needs, queried from the runtime once.
class Prepared {
  public:
    // Finds `processors` of the calling thread's device, on which `kernel` may use `shared_bytes` from now
    // on. Any thread.
    static cudaError_t find(const void* kernel, std::size_t shared_bytes, int& processors) {
        int device = 0;
        if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
        static Prepared known;
        const std::scoped_lock lock(known.mutex_);
        const auto [entry, is_new] = known.processors_.try_emplace({kernel, device}, 0);
        if (is_new) {
            cudaError_t status =
                cudaDeviceGetAttribute(&entry->second, cudaDevAttrMultiProcessorCount, device);
            if (status == cudaSuccess) {
                status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(shared_bytes));
            }
            if (status != cudaSuccess) {
                known.processors_.erase(entry);
                return status;
            }
        }
        processors = entry->second;
        return cudaSuccess;
    }

  private:
    std::mutex mutex_;
    std::map<std::pair<const void*, int>, int> processors_;  // by kernel and device
};

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
