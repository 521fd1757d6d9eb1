#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/moe/crossing.cuh"
#include "backends/accelerators/cuda/ptx/since_hopper.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kPutBlocks = 32;
static_assert(kThreads / 32 <= kCrossingWarps);

__global__ void __launch_bounds__(kThreads)
    list_leaving_kernel(const __grid_constant__ CrossingArgs args) {
    __shared__ CrossingShared shared;
    list_leaving(args, shared);
}

__global__ void __launch_bounds__(kThreads)
    put_lists_kernel(const __grid_constant__ CrossingArgs args) {
    put_lists(args);
}

// Blocks take pairs of multiprocessors, so that the remaining ones hold clusters of two.
__global__ void MKERNEL_CLUSTER(2) __launch_bounds__(kThreads, 1)
    land_lists_kernel(const __grid_constant__ CrossingArgs args) {
    __shared__ CrossingShared shared;
    land_lists(args, shared);
}

void check(const CrossingArgs& args) {
    const int pieces = args.crossing.pieces;
    if (pieces >= 1 && pieces <= kMostPieces && args.row_bytes % 16 == 0) return;
    throw std::invalid_argument(std::to_string(pieces) + " pieces of rows of " +
                                std::to_string(args.row_bytes) + " bytes; expected 1 to " +
                                std::to_string(kMostPieces) + ", and multiples of 16");
}

}  // namespace

void load_crossing() {
    cuda::load_kernel(list_leaving_kernel);
    cuda::load_kernel(put_lists_kernel);
    cuda::load_kernel(land_lists_kernel);
}

void put_tokens(const CrossingArgs& args, cudaStream_t stream) {
    check(args);
    const auto peers = rails_of(args.workspace, args.hierarchical).peers();
    cuda::launch_small("launching lists of tokens for other nodes", list_leaving_kernel,
                       static_cast<unsigned>(peers), kThreads, 0, stream, args);
    cuda::launch_small("launching puts of tokens to other nodes", put_lists_kernel, kPutBlocks,
                       kThreads, 0, stream, args);
}

void land_tokens(const CrossingArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    check(args);
    cuda::launch_small("launching what lands of tokens from other nodes", land_lists_kernel, blocks,
                       kThreads, 0, stream, args);
}

}  // namespace mkernel::cuda::moe
