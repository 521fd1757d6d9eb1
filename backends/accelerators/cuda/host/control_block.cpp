#include "backends/accelerators/cuda/host/control_block.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <new>

#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

ControlBlock::ControlBlock() {
    void* memory = nullptr;
    // With unified addressing the device's address is the same.
    cuda::check(cudaHostAlloc(&memory, sizeof(transport::HostControl),
                              cudaHostAllocMapped | cudaHostAllocPortable),
                "cudaHostAlloc of the host's control block");
    control_ = new (memory) transport::HostControl{};
}

ControlBlock::~ControlBlock() {
    cudaFreeHost(control_);
}

void ControlBlock::abort(transport::AbortCode code) const {
    std::atomic_ref(control_->abort)
        .store(static_cast<std::uint32_t>(code), std::memory_order_release);
}

}  // namespace mkernel::cuda
