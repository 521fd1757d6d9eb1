// The engines as kernels of their own, and the choice between them by alignment.
#include "backends/accelerators/cuda/transfer/transfer.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/accelerators/cuda/transfer/bulk_copy.cuh"
#include "backends/accelerators/cuda/transfer/plain_copy.cuh"

namespace mkernel::cuda::transfer {
namespace {

constexpr int kStages = 8;
constexpr int kOpenStores = 2;
constexpr std::uint32_t kDefaultStageBytes = 16u << 10;
constexpr std::uint32_t kSmallestStageBytes = 4u << 10;
constexpr unsigned kPlainThreads = 1024;
constexpr std::uint32_t kMaxBlocks = 65535;
constexpr const char* kLaunch = "launch of a copy kernel";

__global__ __launch_bounds__(32) void copy_bulk_kernel(char* dst, const char* src,
                                                       std::uint64_t nbytes,
                                                       std::uint32_t stage_bytes) {
    if constexpr (ptx::kSinceHopper) {
        extern __shared__ __align__(128) char stages[];
        __shared__ ptx::Mbarrier full[kStages];
        BulkRing<kStages, kOpenStores> ring(stages, full, stage_bytes);
        if (threadIdx.x == 0) ring.init();
        copy_bulk(ring, dst, src, nbytes, blockIdx.x, gridDim.x);
        if (threadIdx.x == 0) ring.release_stages();  // the end of the grid publishes the writes
    }
}

__global__ __launch_bounds__(kPlainThreads) void copy_plain_kernel(char* dst, const char* src,
                                                                   std::uint64_t nbytes) {
    copy_plain(dst, src, nbytes, std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x,
               std::uint64_t{gridDim.x} * blockDim.x);
}

// Stages are so small that those of every block have work at once: with few bytes, the time until the last
// one leaves matters.
std::uint32_t stage_bytes_for(std::uint64_t nbytes, std::uint32_t blocks) {
    const std::uint64_t even = nbytes / (std::uint64_t{blocks} * kStages) / 128 * 128;
    return static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(even, kSmallestStageBytes, kDefaultStageBytes));
}

void check_effort(Effort effort) {
    if (effort.blocks < 1 || effort.blocks > kMaxBlocks) {
        throw std::invalid_argument("blocks = " + std::to_string(effort.blocks) +
                                    "; expected 1 to " + std::to_string(kMaxBlocks));
    }
    if (effort.stage_bytes % 16 != 0 || effort.stage_bytes > kMaxStageBytes) {
        throw std::invalid_argument("stage_bytes = " + std::to_string(effort.stage_bytes) +
                                    "; expected a multiple of 16, at most " +
                                    std::to_string(kMaxStageBytes));
    }
}

}  // namespace

void copy(void* dst, const void* src, std::uint64_t nbytes, Engine engine, Effort effort,
          cudaStream_t stream) {
    check_effort(effort);
    if (nbytes == 0) return;
    if (engine == Engine::copy_engine) {
        cuda::check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream),
                    "cudaMemcpyAsync");
        return;
    }
    char* to = static_cast<char*>(dst);
    const char* from = static_cast<const char*>(src);
    if (engine == Engine::bulk && alike(dst, src) && cuda::since_hopper(copy_bulk_kernel)) {
        const std::uint32_t stage_bytes =
            effort.stage_bytes != 0 ? effort.stage_bytes : stage_bytes_for(nbytes, effort.blocks);
        const std::uint64_t pieces = (nbytes + stage_bytes - 1) / stage_bytes;
        const auto blocks =
            static_cast<std::uint32_t>(std::min<std::uint64_t>(effort.blocks, pieces));
        cuda::check(
            cudaFuncSetAttribute(copy_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kStages * kMaxStageBytes),
            "cudaFuncSetAttribute");
        cuda::launch_small(kLaunch, copy_bulk_kernel, blocks, 32, kStages * stage_bytes, stream, to,
                           from, nbytes, stage_bytes);
        return;
    }
    constexpr std::uint64_t kBlockBytes = 16 * kPlainThreads;
    const auto blocks = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(effort.blocks, (nbytes + kBlockBytes - 1) / kBlockBytes));
    cuda::launch_small(kLaunch, copy_plain_kernel, blocks, kPlainThreads, 0, stream, to, from,
                       nbytes);
}

}  // namespace mkernel::cuda::transfer
