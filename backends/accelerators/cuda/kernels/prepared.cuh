// What starting a kernel needs to know of a device.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace mkernel::cuda {

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

}  // namespace mkernel::cuda
