// The exchange of the ids of all ranks' tokens, to every rank of the node: the first step of the routing.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/routing.hpp"
#include "backends/accelerators/cuda/ptx/tensor.cuh"

namespace mkernel::cuda::moe {

__device__ inline void push_ids(const RoutingArgs& args, std::uint64_t epoch, int thread,
                                int threads) {
    const Workspace& workspace = args.workspace;
    const int own = args.tables.tokens * args.tables.top_k;
    for (int step = 0; step < workspace.world; ++step) {
        const int other = (workspace.rank + step) % workspace.world;
        const int at = args.exchanges ? other : workspace.rank;
        if (!workspace.near(at)) continue;
        auto* const ids = reinterpret_cast<std::int32_t*>(workspace.data(at) + args.ids_offset);
        std::int32_t* const to = ids + std::int64_t{args.exchanges ? workspace.rank : other} * own;
        for (int i = thread; i < own; i += threads) to[i] = args.own_ids[i];
    }
    transport::fence_system();
    ptx::cluster_barrier();
    if (thread != 0 || !args.exchanges) return;
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        if (!workspace.near(peer)) continue;
        workspace.flags(peer)[workspace.world + workspace.rank].set(epoch);
    }
}

__device__ inline void wait_for_ids(const RoutingArgs& args, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    if (threadIdx.x == 0 && args.exchanges) {
        const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::compute_kernel);
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            const auto flag = static_cast<std::uint32_t>(workspace.world + peer);
            if (!waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                              {flag, static_cast<std::uint32_t>(peer), transport::kNoChunk})) {
                break;  // what lies there is checked before it is used
            }
        }
        if (args.crossing.pieces > 0) {
            const Tables& tables = args.tables;
            const CrossingLists lists{nullptr, tables.world, tables.tokens, args.crossing.pieces};
            waiter.until(workspace.flags(workspace.rank)[lists.listed_flag()], epoch,
                         {lists.listed_flag(), static_cast<std::uint32_t>(workspace.rank),
                          transport::kNoChunk});
        }
    }
    __syncthreads();
}

}  // namespace mkernel::cuda::moe
