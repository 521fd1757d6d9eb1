#include "backends/accelerators/cuda/kernels/moe/dispatched_rows.hpp"

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/e4m3.cuh"
#include "backends/accelerators/cuda/kernels/moe/token_rows.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr unsigned kThreads = 256;
constexpr int kAhead = 8;  // loads of a lane under way

// Copies a token's row, or zeroes a row where there is none. Called by all lanes of a warp.
__device__ void write_row(const DispatchedArgs& args, int row, const char* token) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool scaled = args.scales != nullptr;
    const std::int64_t nbytes = std::int64_t{args.width} * (scaled ? 1 : 2);
    char* const to = args.out + row * nbytes;
    for (std::int64_t at = lane * 16; at < nbytes; at += kAhead * 512) {
        uint4 found[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (token != nullptr && at + i * 512 < nbytes) {
                found[i] = ptx::load_16(token + at + i * 512);
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * 512 < nbytes) ptx::store_16(to + at + i * 512, found[i]);
        }
    }
    if (!scaled) return;
    const int blocks = args.width / kScaledBlock;
    for (int i = lane; i < blocks; i += 32) {
        args.scales[std::int64_t{row} * blocks + i] =
            token != nullptr ? reinterpret_cast<const float*>(token + nbytes)[i] : 1.0f;
    }
}

__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ DispatchedArgs args) {
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const std::uint64_t epoch = args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
    const int warps = static_cast<int>(gridDim.x * (kThreads / 32));
    const int rows = min(args.tables.rows(), args.height);
    for (int row = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 32); row < args.height;
         row += warps) {
        if (row < rows) {
            if (threadIdx.x % 32 == 0) wait_for_tokens(args, waiter, epoch, row, 1);
            __syncwarp();
        }
        write_row(args, row, row < rows ? token_row(args, row) : nullptr);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) wait_for_all_tokens(args, waiter, epoch);
    finish_call(args.workspace, waiter, epoch);
}

}  // namespace

void copy_rows(const DispatchedArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    cuda::launch_small("launching the copies of rows", copy_rows_kernel, blocks, kThreads, 0,
                       stream, args);
}

void load_dispatched_rows() {
    cuda::load_kernel(copy_rows_kernel);
}

}  // namespace mkernel::cuda::moe
