#include "backends/accelerators/hopper/kernels/rendezvous.hpp"

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/cuda/error.hpp"

namespace mkernel::hopper {

namespace {

__global__ void rendezvous_kernel(Region region, WaitLimits limits) {
    if (threadIdx.x != 0) return;
    const Waiter waiter(region, limits, runtime::Waiter::comm_kernel);
    finish_call(region, waiter, region.control().epoch);
}

}  // namespace

void rendezvous(const Region& region, const WaitLimits& limits, cudaStream_t stream) {
    if (region.world == 1) return;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32);
    config.stream = stream;
    cuda::check(cudaLaunchKernelEx(&config, rendezvous_kernel, region, limits),
                "launching rendezvous");
}

}  // namespace mkernel::hopper
