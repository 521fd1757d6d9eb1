// The work of the kernels of far_slots.hpp.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/far_slots.hpp"
#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda {

// Called by one thread.
__device__ inline void put_slots(const Workspace& workspace, const transport::WaitLimits& limits,
                                 std::uint64_t from, std::uint64_t step, const FarSlots& slots,
                                 std::uint32_t piece) {
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    const Rails rails = rails_of(workspace, slots.relayed);
    const std::uint64_t skipped = piece * slots.piece_bytes;
    const std::uint64_t to = slots.offset + workspace.rank * slots.bytes + skipped;
    const std::uint32_t word = kFirstArrival + slots.flag + workspace.rank * slots.pieces() + piece;
    transport::fence_system();
    for (int number = 0; number < rails.peers(); ++number) {
        const int peer = rails.peer(number);
        const std::uint64_t at = from + (slots.relayed ? number : peer) * step + skipped;
        if (!workspace.network.put(waiter, peer, word, {at, to, slots.bytes_of(piece)})) return;
    }
}

// Copies by all threads of the block, which each have several loads under way.
template <class Element, class Load>
__device__ void copy_by_block(char* to, const char* from, std::uint64_t bytes, Load&& load) {
    constexpr int kAhead = 8;
    auto* const out = reinterpret_cast<Element*>(to);
    const auto* const in = reinterpret_cast<const Element*>(from);
    const std::uint64_t count = bytes / sizeof(Element);
    for (std::uint64_t at = threadIdx.x; at < count; at += kAhead * blockDim.x) {
        Element found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * blockDim.x < count) found[i] = load(in + at + i * blockDim.x);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * blockDim.x < count) out[at + i * blockDim.x] = found[i];
        }
    }
}

// Copies from the host's memory, which is read once and never kept.
__device__ inline void copy_staged(char* to, const char* from, std::uint64_t bytes) {
    const auto together =
        reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
    if (together % sizeof(uint4) == 0) {
        copy_by_block<uint4>(to, from, bytes, [](const uint4* at) { return ptx::load_16(at); });
    } else {
        copy_by_block<std::uint32_t>(to, from, bytes,
                                     [](const std::uint32_t* at) { return __ldcv(at); });
    }
}

// Called by all threads of a block.
__device__ inline void land_slots(const Workspace& workspace, const transport::WaitLimits& limits,
                                  const FarSlots& slots) {
    const Network& network = workspace.network;
    const Rails rails = rails_of(workspace, slots.relayed);
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    const std::uint64_t epoch = workspace.control().state.epoch;
    transport::SetWord* const flags = workspace.flags(workspace.rank);
    for (std::uint32_t item = 0; item < slots.pieces() * rails.peers(); ++item) {
        const std::uint32_t piece = item / rails.peers();
        const auto source =
            static_cast<std::uint32_t>(rails.peer(static_cast<int>(item) % rails.peers()));
        const std::uint32_t flag = slots.flag + source * slots.pieces() + piece;
        if (threadIdx.x == 0) {
            network.watch(waiter, epoch, network.staged ? workspace.landed() : flags, flag, {1}, {},
                          [&](std::uint32_t) { return source; });
        }
        const int first = network.staged ? 0 : 1;  // the NIC wrote to the own data area
        const int ranks = slots.passed_on ? rails.local : 1;
        if (first == ranks) continue;
        __syncthreads();
        const std::uint64_t at = slots.offset + source * slots.bytes + piece * slots.piece_bytes;
        for (int step = first; step < ranks; ++step) {
            copy_staged(workspace.data(rails.neighbour(step)) + at, network.area + at,
                        slots.bytes_of(piece));
        }
        transport::fence_system();
        __syncthreads();
        for (int step = first; threadIdx.x == 0 && step < ranks; ++step) {
            workspace.flags(rails.neighbour(step))[flag].set(epoch);
        }
    }
}

}  // namespace mkernel::cuda
