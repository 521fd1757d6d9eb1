#include "backends/accelerators/hopper/kernels/rendezvous.hpp"

#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/accelerators/hopper/device/call.cuh"

namespace mkernel::hopper {

namespace {

__global__ void rendezvous_kernel(Workspace workspace, transport::WaitLimits limits) {
    if (threadIdx.x != 0) return;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    finish_call(workspace, waiter, workspace.control().state.epoch);
}

}  // namespace

void rendezvous(const Workspace& workspace, const transport::WaitLimits& limits,
                cudaStream_t stream) {
    if (workspace.world == 1) return;
    cuda::launch_small("launching rendezvous", rendezvous_kernel, 1, 32, 0, stream, workspace,
                       limits);
}

}  // namespace mkernel::hopper
