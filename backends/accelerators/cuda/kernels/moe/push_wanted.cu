#include "backends/accelerators/cuda/kernels/moe/push_wanted.hpp"

#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr int kThreads = 1024;
constexpr int kAhead = 8;  // loads of a lane under way
constexpr unsigned kAll = 0xFFFFFFFFu;
static_assert(kMaxRanks <= 32);

// Returns the peers of this node that have experts of a token, a bit each. Called by all lanes of a warp.
__device__ unsigned wanting(const PushArgs& args, int token) {
    const Workspace& workspace = args.workspace;
    const std::int32_t* const ids = args.ids + std::int64_t{token} * args.top_k;
    unsigned ranks = 0;
    for (int slot = static_cast<int>(threadIdx.x) % 32; slot < args.top_k; slot += 32) {
        const int id = ids[slot];
        if (id < 0 || id >= args.experts * workspace.world) continue;
        const int rank = id / args.experts;
        if (rank != workspace.rank && workspace.near(rank)) ranks |= 1u << rank;
    }
    return __reduce_or_sync(kAll, ranks);
}

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
        const unsigned ranks = wanting(args, token);
        if (ranks == 0) continue;
        const char* const from = args.x + token * args.row_bytes;
        const std::int64_t to = (before + token) * args.row_bytes;
        for (std::int64_t at = threadIdx.x % 32 * 16; at < args.row_bytes; at += kAhead * 512) {
            uint4 found[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (at + i * 512 < args.row_bytes) found[i] = ptx::load_16(from + at + i * 512);
            }
            for (unsigned left = ranks; left != 0; left &= left - 1) {
                char* const there = workspace.data(__ffs(static_cast<int>(left)) - 1) + to + at;
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    if (at + i * 512 < args.row_bytes) ptx::store_16(there + i * 512, found[i]);
                }
            }
        }
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
