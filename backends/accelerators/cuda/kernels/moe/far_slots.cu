#include "backends/accelerators/cuda/kernels/moe/far_slots.hpp"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda {

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kLandingThreads = 512;

// Runs as one warp, of which one thread pushes.
__global__ void put_kernel(const __grid_constant__ Workspace workspace,
                           transport::WaitLimits limits, std::uint64_t from, std::uint64_t step,
                           const __grid_constant__ FarSlots slots, std::uint32_t piece) {
    if (threadIdx.x != 0) return;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    const std::uint64_t skipped = piece * slots.piece_bytes;
    const std::uint64_t to = slots.offset + workspace.rank * slots.bytes + skipped;
    const std::uint32_t word = kFirstArrival + slots.flag + workspace.rank * slots.pieces() + piece;
    transport::fence_system();
    for (int number = 0; number < workspace.far(); ++number) {
        const int peer = workspace.far_rank(number);
        if (!workspace.network.put(waiter, peer, word,
                                   {from + peer * step + skipped, to, slots.bytes_of(piece)})) {
            return;
        }
    }
}

// Copies by all threads of the block, which each have several loads under way.
template <class Element, class Load>
__device__ void copy(char* to, const char* from, std::uint64_t bytes, Load&& load) {
    constexpr int kAhead = 8;
    auto* const out = reinterpret_cast<Element*>(to);
    const auto* const in = reinterpret_cast<const Element*>(from);
    const std::uint64_t count = bytes / sizeof(Element);
    for (std::uint64_t at = threadIdx.x; at < count; at += kAhead * kLandingThreads) {
        Element found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * kLandingThreads < count) found[i] = load(in + at + i * kLandingThreads);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * kLandingThreads < count) out[at + i * kLandingThreads] = found[i];
        }
    }
}

// Copies from the host's memory, which is read once and never kept.
__device__ void copy_staged(char* to, const char* from, std::uint64_t bytes) {
    const auto together =
        reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (together % sizeof(uint4) == 0) {
        copy<uint4>(to, from, bytes, [](const uint4* at) { return ptx::load_16(at); });
    } else {
        copy<std::uint32_t>(to, from, bytes, [](const std::uint32_t* at) { return __ldcv(at); });
    }
}

__global__ void __launch_bounds__(kLandingThreads)
    land_kernel(const __grid_constant__ Workspace workspace, transport::WaitLimits limits,
                const __grid_constant__ Landing landing) {
    const Network& network = workspace.network;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    const std::uint64_t epoch = workspace.control().state.epoch;
    transport::SetWord* const flags = workspace.flags(workspace.rank);
    for (int each = 0; each < landing.count; ++each) {
        const FarSlots& slots = landing.slots[each];
        for (std::uint32_t item = 0; item < slots.pieces() * workspace.far(); ++item) {
            const std::uint32_t piece = item / workspace.far();
            const auto source = static_cast<std::uint32_t>(
                workspace.far_rank(static_cast<int>(item) % workspace.far()));
            const std::uint32_t flag = slots.flag + source * slots.pieces() + piece;
            if (threadIdx.x == 0) {
                network.watch(waiter, epoch, network.staged ? workspace.landed() : flags, flag, {1},
                              {}, [&](std::uint32_t) { return source; });
            }
            if (!network.staged) continue;
            __syncthreads();
            const std::uint64_t at =
                slots.offset + source * slots.bytes + piece * slots.piece_bytes;
            copy_staged(workspace.data(workspace.rank) + at, network.area + at,
                        slots.bytes_of(piece));
            transport::fence_system();
            __syncthreads();
            if (threadIdx.x == 0) flags[flag].set(epoch);
        }
    }
}

void check(const Workspace& workspace, const FarSlots& slots) {
    if (slots.piece_bytes % 4 == 0 && slots.flag + workspace.world * slots.pieces() <= kFlags &&
        slots.offset % 4 == 0 && slots.bytes % 4 == 0) {
        return;
    }
    throw std::invalid_argument("slots of " + std::to_string(slots.bytes) + " bytes at " +
                                std::to_string(slots.offset) + ", flag " +
                                std::to_string(slots.flag) + "; expected multiples of 4, and " +
                                std::to_string(kFlags) + " flags in all");
}

}  // namespace

void load_far_slots() {
    cuda::load_kernel(put_kernel);
    cuda::load_kernel(land_kernel);
}

void put_far(const Workspace& workspace, const transport::WaitLimits& limits, std::uint64_t from,
             std::uint64_t step, const FarSlots& slots, std::uint32_t piece, cudaStream_t stream) {
    check(workspace, slots);
    cuda::launch_small("launching puts to other nodes", put_kernel, 1, kWarp, 0, stream, workspace,
                       limits, from, step, slots, piece);
}

void land_far(const Workspace& workspace, const transport::WaitLimits& limits,
              const Landing& landing, cudaStream_t stream) {
    if (landing.count < 1 || landing.count > kMostFarSlots) {
        throw std::invalid_argument("a landing of " + std::to_string(landing.count) +
                                    " kinds of slots; 1 to " + std::to_string(kMostFarSlots));
    }
    for (int each = 0; each < landing.count; ++each) check(workspace, landing.slots[each]);
    cuda::launch_small("launching what lands from other nodes", land_kernel, 1, kLandingThreads, 0,
                       stream, workspace, limits, landing);
}

}  // namespace mkernel::cuda
