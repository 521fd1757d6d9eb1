#include "backends/accelerators/cuda/kernels/rendezvous.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/accelerators/cuda/transfer/plain_copy.cuh"

namespace mkernel::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kMostBlocks = 396;  // three a multiprocessor
constexpr std::uint64_t kLeastBytes = 16 * kThreads;

// Blocks [first[i], first[i + 1]) make copy i.
struct Shares {
    unsigned first[LastCopies::kMost + 1];
};

__global__ __launch_bounds__(kThreads,
                             3) void rendezvous_kernel(const __grid_constant__ Workspace workspace,
                                                       transport::WaitLimits limits,
                                                       const __grid_constant__ LastCopies copies,
                                                       const __grid_constant__ Shares shares) {
    int mine = 0;
    while (mine < copies.count && blockIdx.x >= shares.first[mine + 1]) ++mine;
    if (mine < copies.count) {
        const LastCopies::Copy& copy = copies.each[mine];
        const unsigned first = shares.first[mine];
        transfer::copy_plain(static_cast<char*>(copy.to), static_cast<const char*>(copy.from),
                             copy.nbytes, (blockIdx.x - first) * blockDim.x + threadIdx.x,
                             (shares.first[mine + 1] - first) * blockDim.x);
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    finish_call(workspace, waiter, workspace.control().state.epoch);
}

// Returns shares of blocks in proportion to bytes, at least one each.
Shares shared(const LastCopies& copies) {
    std::uint64_t total = 0;
    for (int i = 0; i < copies.count; ++i) total += copies.each[i].nbytes;
    const std::uint64_t blocks =
        std::clamp<std::uint64_t>((total + kLeastBytes - 1) / kLeastBytes, 1, kMostBlocks);
    Shares shares{};
    for (int i = 0; i < copies.count; ++i) {
        const auto share = static_cast<unsigned>(blocks * copies.each[i].nbytes / total);
        shares.first[i + 1] = shares.first[i] + std::max(share, 1u);
    }
    return shares;
}

}  // namespace

void load_rendezvous() {
    cuda::load_kernel(rendezvous_kernel);
}

void LastCopies::add(std::uint64_t to, std::uint64_t from, std::uint64_t nbytes) {
    if (nbytes == 0 || to == from) return;
    if (count == kMost) {
        throw std::invalid_argument("a call ends with more than " + std::to_string(kMost) +
                                    " copies");
    }
    each[count++] = {reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes};
}

void rendezvous(const Workspace& workspace, const transport::WaitLimits& limits,
                const LastCopies& copies, cudaStream_t stream) {
    if (workspace.world == 1 && copies.count == 0) return;
    const Shares shares = shared(copies);
    const unsigned blocks = std::max(shares.first[copies.count], 1u);
    const unsigned threads = copies.count == 0 ? 32 : kThreads;
    cuda::launch_small("launching rendezvous", rendezvous_kernel, blocks, threads, 0, stream,
                       workspace, limits, copies, shares);
}

}  // namespace mkernel::cuda
