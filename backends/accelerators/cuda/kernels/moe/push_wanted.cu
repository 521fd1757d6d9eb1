#include "backends/accelerators/cuda/kernels/moe/push_wanted.hpp"

#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/wanted_rows.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr int kThreads = 1024;

// Blocks take pairs of multiprocessors, so that the remaining ones hold clusters of two.
__global__ void MKERNEL_CLUSTER(2) __launch_bounds__(kThreads, 1)
    push_wanted_kernel(const __grid_constant__ PushArgs args) {
    const Workspace& workspace = args.workspace;
    // No rank ends the call before it has this one's flag (token_rows.cuh), so it is still this call's.
    const std::uint64_t epoch = workspace.control().state.epoch;
    const int warps = static_cast<int>(gridDim.x) * (kThreads / 32);
    const std::int64_t before = std::int64_t{workspace.rank} * args.tokens;
    for (int token =
             static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
         token < args.tokens; token += warps) {
        const std::int32_t* const ids = args.ids + std::int64_t{token} * args.top_k;
        const unsigned ranks =
            wanting(workspace, ids, args.top_k, args.experts) & ~(1u << workspace.rank);
        const std::int64_t to = (before + token) * args.row_bytes;
        copy_row(args.x + token * args.row_bytes, args.row_bytes, ranks,
                 [&](int rank) { return workspace.data(rank) + to; });
    }
    transport::fence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    Control& control = workspace.control();
    if (atomicAdd(&control.pushed, 1u) != gridDim.x - 1) return;
    control.pushed = 0;
    transport::fence_system();
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        if (!workspace.near(peer)) continue;
        workspace.flags(peer)[workspace.rank].set_fenced(epoch);
    }
}

}  // namespace

void push_wanted(const PushArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    cuda::launch_small("launching the push of wanted tokens", push_wanted_kernel, blocks, kThreads,
                       0, stream, args);
}

}  // namespace mkernel::cuda::moe
