// The work of the kernel of crossing.hpp, by blocks of whole warps.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/attention/crossing.hpp"
#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda::attention {

struct CrossingShared {
    bool goes_on;
};

inline constexpr int kVector = 16;
inline constexpr std::uint32_t kPutsAChunk = 2;  // of keys, and of values

// A chunk's rows, and where they lie in a slot.
struct KeyRows {
    std::int32_t chunk, head, row;

    __device__ KeyRows(const KeysCrossing& args, std::int32_t number)
        : chunk(number),
          head(number / args.chunks.of_head()),
          row(number % args.chunks.of_head() * args.chunks.chunk_rows) {}

    // Returns how many of them a rank that sees the first `seen` rows wants.
    [[nodiscard]] __device__ std::int32_t count(const KeysCrossing& args, std::int32_t seen) const {
        return max(0, min(args.chunks.chunk_rows, seen - row));
    }
    // Returns the bytes of a slot before those of their keys (`which` 0), or values (1).
    [[nodiscard]] __device__ std::uint64_t at(const KeysCrossing& args, int which) const {
        const std::int64_t rows = std::int64_t{which * args.chunks.heads + head} * args.chunks.rows;
        return static_cast<std::uint64_t>(rows + row) * args.row_bytes;
    }
};

__device__ inline std::uint64_t slot_bytes(const KeysCrossing& args) {
    return std::uint64_t{2} * args.chunks.heads * args.chunks.rows * args.row_bytes;
}
__device__ inline std::uint64_t slot_at(const KeysCrossing& args, int rank, int source) {
    const Workspace& workspace = args.workspace;
    return slot_of(rank, source, workspace.world, workspace.local) * slot_bytes(args);
}

// Returns how many rows of `source` a rank sees.
__device__ inline std::int32_t rows_seen(const KeysCrossing& args, int rank, int source) {
    return args.causal && source < rank ? args.chunks.rows / 2 : args.chunks.rows;
}

// Calls store(i, load(i)) for all `count` vectors, by all threads of the block, which each have several loads under way.
template <class Load, class Store>
__device__ inline void copy_vectors(int count, Load&& load, Store&& store) {
    constexpr int kAhead = 8;
    const int threads = static_cast<int>(blockDim.x);
    for (int first = static_cast<int>(threadIdx.x); first < count; first += kAhead * threads) {
        uint4 found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * threads < count) found[i] = load(first + i * threads);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * threads < count) store(first + i * threads, found[i]);
        }
    }
}

// Sends the chunks that are this block's, as far as somebody sees them. Called by all threads of the block.
__device__ inline void send_keys(const KeysCrossing& args, const transport::DeviceWaiter& waiter,
                                 std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const Rails rails = rails_of(workspace, args.hierarchical);
    const int own = workspace.rank;
    const int vectors = args.row_bytes / kVector;
    const std::uint64_t outbox = (workspace.world - 1) * slot_bytes(args);
    // What the first rank sees of this one's, the others see, too.
    const std::int32_t leaving = rows_seen(args, own == 0 ? 1 : 0, own);
    for (std::int32_t number = static_cast<std::int32_t>(blockIdx.x); number < args.chunks.count();
         number += args.put_blocks) {
        const KeyRows rows(args, number);
        const int count = rows.count(args, leaving) * vectors;
        if (count == 0) continue;
        for (int which = 0; which < 2; ++which) {
            const Rows& of = which == 0 ? args.k : args.v;
            const std::int64_t first = rows.head / args.kv_heads * of.batch +
                                       rows.head % args.kv_heads * of.head + rows.row * of.row;
            const char* const from = static_cast<const char*>(of.at) + 2 * first;
            const std::uint64_t at = rows.at(args, which);
            copy_vectors(
                count,
                [&](int i) {
                    return ptx::load_16(from + 2 * (i / vectors) * of.row + i % vectors * kVector);
                },
                [&](int i, uint4 value) {
                    ptx::store_16(network.area + outbox + at + i * kVector, value);
                    for (int step = 1; step < rails.local; ++step) {
                        const int near = rails.neighbour(step);
                        if (rows.row + i / vectors >= rows_seen(args, near, own)) continue;
                        char* const slot = workspace.data(near) + slot_at(args, near, own);
                        ptx::store_16(slot + at + i * kVector, value);
                    }
                });
        }
        transport::fence_system();
        __syncthreads();
        if (threadIdx.x != 0) continue;
        const std::uint32_t flag = args.chunks.flag(own, number);
        for (int step = 1; step < rails.local; ++step) {
            const int near = rails.neighbour(step);
            if (rows.count(args, rows_seen(args, near, own)) == 0) continue;
            workspace.flags(near)[flag].set_fenced(epoch);
        }
        for (int peer_number = 0; peer_number < rails.peers(); ++peer_number) {
            const int peer = rails.peer(peer_number);
            const auto bytes = static_cast<std::uint64_t>(
                rows.count(args, rows_seen(args, peer, own)) * args.row_bytes);
            for (int which = 0; bytes > 0 && which < 2; ++which) {
                const std::uint64_t at = rows.at(args, which);
                const std::uint64_t to = slot_at(args, peer, own) + at;
                network.put(waiter, peer, kFirstArrival + flag, {outbox + at, to, bytes});
            }
        }
    }
}

// Lands the chunks of peers that are this block's, and passes them on. Called by all threads of the block.
__device__ inline void land_keys(const KeysCrossing& args, CrossingShared& shared,
                                 const transport::DeviceWaiter& waiter, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const Rails rails = rails_of(workspace, args.hierarchical);
    const int own = workspace.rank;
    const int takers = args.hierarchical ? rails.local : 1;
    const int copied = network.staged ? 0 : 1;  // the first of them to which it is
    const int vectors = args.row_bytes / kVector;
    const int blocks = static_cast<int>(gridDim.x) - args.put_blocks;
    for (int item = static_cast<int>(blockIdx.x) - args.put_blocks;
         item < args.chunks.count() * rails.peers(); item += blocks) {
        const KeyRows rows(args, item / rails.peers());
        const int source = rails.peer(item % rails.peers());
        const int count = rows.count(args, rows_seen(args, own, source)) * vectors;
        if (count == 0) continue;
        const std::uint32_t flag = args.chunks.flag(source, rows.chunk);
        const std::uint32_t word = kFirstArrival + flag;
        if (threadIdx.x == 0) {
            shared.goes_on =
                waiter.until(network.words[word], network.expected[word].after(kPutsAChunk),
                             {word, static_cast<std::uint32_t>(source), flag});
        }
        __syncthreads();
        if (!shared.goes_on) return;
        const std::uint64_t slot = slot_at(args, own, source);
        for (int which = 0; copied < takers && which < 2; ++which) {
            const std::uint64_t at = rows.at(args, which);
            copy_vectors(
                count, [&](int i) { return ptx::load_16(network.area + slot + at + i * kVector); },
                [&](int i, uint4 value) {
                    for (int step = copied; step < takers; ++step) {
                        const int to = rails.neighbour(step);
                        ptx::store_16(
                            workspace.data(to) + slot_at(args, to, source) + at + i * kVector,
                            value);
                    }
                });
        }
        transport::fence_system();
        __syncthreads();
        if (threadIdx.x != 0) continue;
        network.expected[word].move_on(kPutsAChunk);
        for (int step = 0; step < takers; ++step) {
            workspace.flags(rails.neighbour(step))[flag].set_fenced(epoch);
        }
    }
}

__device__ inline void cross_keys(const KeysCrossing& args, CrossingShared& shared) {
    const Workspace& workspace = args.workspace;
    const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::comm_kernel);
    const std::uint64_t epoch = workspace.control().state.epoch;
    if (threadIdx.x == 0) {
        std::uint32_t& running = workspace.control().crossing;
        if (atomicAdd(&running, 1u) == gridDim.x - 1) {
            running = 0;
            transport::fence_system();
            workspace.flags(workspace.rank)[kCrossingFlag].set_fenced(epoch);
        }
    }
    if (static_cast<int>(blockIdx.x) < args.put_blocks) {
        send_keys(args, waiter, epoch);
    } else {
        land_keys(args, shared, waiter, epoch);
    }
}

}  // namespace mkernel::cuda::attention
