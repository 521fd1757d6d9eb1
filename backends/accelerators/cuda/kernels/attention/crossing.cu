#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/attention/crossing.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::attention {

namespace {

constexpr unsigned kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    cross_keys_kernel(const __grid_constant__ KeysCrossing args) {
    __shared__ CrossingShared shared;
    cross_keys(args, shared);
}

__global__ void await_crossing_kernel(const __grid_constant__ Workspace workspace,
                                      transport::WaitLimits limits) {
    if (threadIdx.x != 0) return;
    const auto own = static_cast<std::uint32_t>(workspace.rank);
    waiter_of(workspace, limits, transport::Waiter::compute_kernel)
        .until(workspace.flags(workspace.rank)[kCrossingFlag], workspace.control().state.epoch,
               {kCrossingFlag, own, transport::kNoChunk});
}

void check(const KeysCrossing& args, std::uint32_t land_blocks) {
    const KeyChunks& chunks = args.chunks;
    const bool fits = chunks.heads > 0 && chunks.rows > 0 && chunks.chunk_rows > 0 &&
                      args.kv_heads > 0 && chunks.heads % args.kv_heads == 0 &&
                      args.row_bytes > 0 && args.row_bytes % kVector == 0 && args.put_blocks > 0 &&
                      land_blocks > 0 && args.workspace.far() > 0;
    const std::int64_t flags =
        std::int64_t{args.workspace.world} * chunks.heads * (fits ? chunks.of_head() : 0);
    if (fits && flags <= kCrossingFlag) return;
    throw std::invalid_argument(
        std::to_string(chunks.heads) + " heads of " + std::to_string(chunks.rows) + " rows of " +
        std::to_string(args.row_bytes) + " bytes in chunks of " +
        std::to_string(chunks.chunk_rows) + ", by " + std::to_string(args.put_blocks) + " and " +
        std::to_string(land_blocks) + " blocks on " + std::to_string(args.workspace.world) +
        " ranks; all are positive, rows multiples of 16 bytes, and chunks of all ranks at most " +
        std::to_string(kCrossingFlag));
}

}  // namespace

void cross_keys(const KeysCrossing& args, std::uint32_t land_blocks, cudaStream_t stream) {
    check(args, land_blocks);
    cuda::launch_small("launching keys for other nodes", cross_keys_kernel,
                       static_cast<unsigned>(args.put_blocks) + land_blocks, kThreads, 0, stream,
                       args);
}

void await_crossing(const Workspace& workspace, const transport::WaitLimits& limits,
                    cudaStream_t stream) {
    cuda::launch_small("launching the wait for a crossing", await_crossing_kernel, 1, 32, 0, stream,
                       workspace, limits);
}

void load_crossing() {
    cuda::load_kernel(cross_keys_kernel);
    cuda::load_kernel(await_crossing_kernel);
}

}  // namespace mkernel::cuda::attention
