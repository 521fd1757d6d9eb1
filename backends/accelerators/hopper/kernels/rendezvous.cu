#include "backends/accelerators/hopper/kernels/rendezvous.hpp"

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/cuda/small_launch.cuh"

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
    cuda::launch_small("launching rendezvous", rendezvous_kernel, 1, 32, 0, stream, region, limits);
}

}  // namespace mkernel::hopper
