// The work of the kernels of crossing.hpp, by blocks of whole warps.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing.hpp"
#include "backends/accelerators/cuda/kernels/moe/wanted_rows.cuh"

namespace mkernel::cuda::moe {

inline constexpr int kCrossingWarps = 32;  // the most of a block

// Shared memory of a block.
struct CrossingShared {
    int before
        [kGroups];  // tokens of the groups before, and of those of the group that have a place
    int counts[kGroups][kCrossingWarps];
    bool goes_on;
};

__device__ inline CrossingLists lists_of(const CrossingArgs& args) {
    const Workspace& workspace = args.workspace;
    return {reinterpret_cast<std::int32_t*>(workspace.data(workspace.rank) + args.crossing.offset),
            workspace.world, args.tokens, args.crossing.pieces};
}

__device__ inline Rails rails_in(const CrossingArgs& args) {
    return rails_of(args.workspace, args.hierarchical);
}

// Returns the group of a token in the list for `ranks` ranks from `first` on; -1: they do not want it.
__device__ inline int group_of_token(const CrossingArgs& args, const std::int32_t* ids, int first,
                                     int ranks) {
    int expert = args.experts;
    for (int slot = 0; slot < args.top_k; ++slot) {
        const int id = ids[slot] - first * args.experts;
        if (id >= 0 && id < ranks * args.experts) expert = min(expert, id % args.experts);
    }
    return expert == args.experts ? -1 : CrossingLists::group_of(expert, args.experts);
}

// Makes the list of tokens, whose ids are [tokens, top_k], for `ranks` ranks from `first` on: the token at each place,
// the end of each group and, where there is memory for them, the place of each token. Called by all threads of a block.
__device__ inline void make_list(const CrossingArgs& args, CrossingShared& shared,
                                 const std::int32_t* ids, int first, int ranks,
                                 std::int32_t* tokens, std::int32_t* ends, std::int32_t* places) {
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
    const int warp = thread / 32;
    const auto group_at = [&](int token) {
        if (token >= args.tokens) return -1;
        return group_of_token(args, ids + std::int64_t{token} * args.top_k, first, ranks);
    };
    __syncthreads();  // the list before is done with shared memory
    for (int i = thread; i < kGroups; i += threads) shared.before[i] = 0;
    for (int i = thread; i < kGroups * kCrossingWarps; i += threads) (&shared.counts[0][0])[i] = 0;
    __syncthreads();
    for (int token = thread; token < args.tokens; token += threads) {
        const int group = group_at(token);
        if (group >= 0) atomicAdd(&shared.before[group], 1);
    }
    __syncthreads();
    if (thread == 0) {
        int sum = 0;
        for (int group = 0; group < kGroups; ++group) {
            const int count = shared.before[group];
            shared.before[group] = sum;
            ends[group] = sum += count;
        }
    }
    __syncthreads();
    for (int from = 0; from < args.tokens; from += threads) {
        const int token = from + thread;
        const int group = group_at(token);
        const unsigned same = __match_any_sync(0xFFFFFFFFu, group);
        const int rank = __popc(same & ((1u << thread % 32) - 1));
        if (group >= 0 && rank == 0) shared.counts[group][warp] = __popc(same);
        __syncthreads();
        int place = -1;
        if (group >= 0) {
            place = shared.before[group] + rank;
            for (int other = 0; other < warp; ++other) place += shared.counts[group][other];
            tokens[place] = token;
        }
        if (places != nullptr && token < args.tokens) places[token] = place;
        __syncthreads();
        for (int i = thread; i < kGroups; i += threads) {
            for (int& count : shared.counts[i]) {
                shared.before[i] += count;
                count = 0;
            }
        }
        __syncthreads();
    }
}

// Waits until rank `source` has signalled flag `flag` in this call. A thread of several blocks may wait for it; when
// all have, one of them counts it (`count_arrival`).
__device__ inline bool arrived(const Network& network, const transport::DeviceWaiter& waiter,
                               std::uint32_t flag, int source) {
    const std::uint32_t word = kFirstArrival + flag;
    return waiter.until(network.words[word], network.expected[word].after(1),
                        {word, static_cast<std::uint32_t>(source), flag});
}
__device__ inline void count_arrival(const Network& network, std::uint32_t flag) {
    network.expected[kFirstArrival + flag].move_on(1);
}

// Calls body(piece, number of the peer, peer) for each piece that this rank exchanges, in the order of pieces, until
// it returns false.
template <class Body>
__device__ inline void for_each_piece(const CrossingArgs& args, Body&& body) {
    const Rails rails = rails_in(args);
    for (int piece = 0; piece < args.crossing.pieces; ++piece) {
        for (int number = 0; number < rails.peers(); ++number) {
            if (!body(piece, number, rails.peer(number))) return;
        }
    }
}

// Calls copy(place in the list) for the rows of a piece, of a list of `count`, that are this warp's: the warps of all
// blocks share them. Then returns true in one thread, once all blocks have called it and their writes are fenced.
template <class Copy>
__device__ inline bool copy_piece(const CrossingArgs& args, int piece, int rank, int count,
                                  Copy&& copy) {
    const CrossingLists lists = lists_of(args);
    const int rows = lists.piece_rows();
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int end = min((piece + 1) * rows, count);
    for (int at = piece * rows + static_cast<int>(blockIdx.x) * warps +
                  static_cast<int>(threadIdx.x) / 32;
         at < end; at += static_cast<int>(gridDim.x) * warps) {
        copy(at);
    }
    transport::fence_system();
    __syncthreads();
    if (threadIdx.x != 0) return false;
    std::uint32_t* const done = lists.done(rank, piece);
    if (atomicAdd(done, 1u) != gridDim.x - 1) return false;
    *done = 0;
    transport::fence_system();
    return true;
}

// Makes the own lists, a block a peer, and starts to count.
__device__ inline void list_leaving(const CrossingArgs& args, CrossingShared& shared) {
    const CrossingLists lists = lists_of(args);
    const Rails rails = rails_in(args);
    if (blockIdx.x == 0) {
        std::uint32_t* const first = lists.done(0, 0);
        for (auto* at = first + threadIdx.x; at <= lists.listed(); at += blockDim.x) *at = 0;
    }
    const int peer = rails.peer(static_cast<int>(blockIdx.x));
    const int first = args.hierarchical ? peer / rails.local * rails.local : peer;
    make_list(args, shared, args.ids, first, args.hierarchical ? rails.local : 1,
              lists.leaving(peer), lists.leaving_ends(peer), nullptr);
}

// Puts the own ids, then the pieces of the own lists as they are written to the outbox.
__device__ inline void put_lists(const CrossingArgs& args) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const CrossingLists lists = lists_of(args);
    const Rails rails = rails_in(args);
    const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::comm_kernel);
    const auto own = static_cast<std::uint64_t>(workspace.rank);
    if (blockIdx.x == 0) {
        const int places = args.tokens * args.top_k;
        const std::uint64_t nbytes = places * sizeof(std::int32_t);
        const std::uint64_t at = args.ids_offset + own * nbytes;
        auto* const out = reinterpret_cast<std::int32_t*>(network.area + at);
        for (int i = static_cast<int>(threadIdx.x); i < places; i += static_cast<int>(blockDim.x)) {
            out[i] = args.ids[i];
        }
        transport::fence_system();
        __syncthreads();
        for (int number = 0; threadIdx.x == 0 && number < rails.peers(); ++number) {
            const auto word = kFirstArrival + static_cast<std::uint32_t>(workspace.world + own);
            if (!network.put(waiter, rails.peer(number), word, {at, at, nbytes})) break;
        }
    }
    const std::uint64_t slot = args.tokens * args.row_bytes;
    for_each_piece(args, [&](int piece, int number, int peer) {
        const int count = lists.leaving_ends(peer)[kGroups - 1];
        const std::uint64_t from = args.outbox_offset + number * slot;
        const bool written = copy_piece(args, piece, peer, count, [&](int at) {
            copy_row(args.x + lists.leaving(peer)[at] * args.row_bytes, args.row_bytes, 1u,
                     [&](int) { return network.area + from + at * args.row_bytes; });
        });
        if (!written) return true;
        const int first = piece * lists.piece_rows();
        const int rows = min(lists.piece_rows(), count - first);
        const std::uint64_t at = first * args.row_bytes;
        network.put(waiter, peer, kFirstArrival + lists.flag(workspace.rank, piece),
                    rows <= 0 ? transport::Put{}
                              : transport::Put{from + at, own * slot + at,
                                               rows * static_cast<std::uint64_t>(args.row_bytes)});
        return true;
    });
}

// Sets a flag, after a fence of this thread, on this rank, and hierarchically on all of its node.
__device__ inline void set_here(const CrossingArgs& args, std::uint32_t flag, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    for (int step = 0; step < (args.hierarchical ? workspace.local : 1); ++step) {
        workspace.flags(rails_in(args).neighbour(step))[flag].set_fenced(epoch);
    }
}

// Brings ids of peers to where they are read, and makes the lists of what comes. Returns false where the call is given
// up.
__device__ inline bool land_ids(const CrossingArgs& args, CrossingShared& shared,
                                const transport::DeviceWaiter& waiter, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const CrossingLists lists = lists_of(args);
    const Rails rails = rails_in(args);
    transport::SetWord* const flags = workspace.flags(workspace.rank);
    const int places = args.tokens * args.top_k;
    // Returns true in all threads of the block if `wait`, which one of them calls, does.
    const auto all_go_on = [&](auto&& wait) {
        __syncthreads();
        if (threadIdx.x == 0) shared.goes_on = wait();
        __syncthreads();
        return shared.goes_on;
    };
    const auto ids_at = [&](char* area, int source) {
        return reinterpret_cast<std::int32_t*>(area + args.ids_offset) +
               std::int64_t{source} * places;
    };
    for (int number = static_cast<int>(blockIdx.x); number < rails.peers();
         number += static_cast<int>(gridDim.x)) {
        const int source = rails.peer(number);
        const auto flag = static_cast<std::uint32_t>(workspace.world + source);
        if (!all_go_on([&] { return arrived(network, waiter, flag, source); })) return false;
        const std::int32_t* const from = ids_at(network.area, source);
        for (int step = network.staged ? 0 : 1; step < (args.hierarchical ? rails.local : 1);
             ++step) {
            std::int32_t* const to = ids_at(workspace.data(rails.neighbour(step)), source);
            for (int i = static_cast<int>(threadIdx.x); i < places;
                 i += static_cast<int>(blockDim.x)) {
                to[i] = __ldcv(from + i);
            }
        }
        transport::fence_system();
        __syncthreads();
        if (threadIdx.x == 0) {
            count_arrival(network, flag);
            set_here(args, flag, epoch);
        }
    }
    for (int number = static_cast<int>(blockIdx.x); number < workspace.far();
         number += static_cast<int>(gridDim.x)) {
        const int source = workspace.far_rank(number);
        const auto from = static_cast<std::uint32_t>(source);
        const std::uint32_t flag = static_cast<std::uint32_t>(workspace.world) + from;
        if (!all_go_on([&] {
                return waiter.until(flags[flag], epoch, {flag, from, transport::kNoChunk});
            })) {
            return false;
        }
        make_list(args, shared, ids_at(workspace.data(workspace.rank), source),
                  args.hierarchical ? workspace.first : workspace.rank,
                  args.hierarchical ? rails.local : 1, lists.arriving(source), lists.ends(source),
                  lists.places(source));
    }
    __threadfence();
    return all_go_on([&] {
        const std::uint32_t flag = lists.listed_flag();
        if (atomicAdd(lists.listed(), 1u) == gridDim.x - 1) {
            *lists.listed() = 0;
            transport::fence_system();
            flags[flag].set_fenced(epoch);
        }
        return waiter.until(
            flags[flag], epoch,
            {flag, static_cast<std::uint32_t>(workspace.rank), transport::kNoChunk});
    });
}

// Lands the pieces of peers, and passes them on.
__device__ inline void land_lists(const CrossingArgs& args, CrossingShared& shared) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const CrossingLists lists = lists_of(args);
    const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::comm_kernel);
    const std::uint64_t epoch = workspace.control().state.epoch;
    if (!land_ids(args, shared, waiter, epoch)) return;
    const unsigned here = 1u << workspace.rank;
    const unsigned takes = (args.hierarchical ? ~0u : here) & (network.staged ? ~0u : ~here);
    const auto* const all_ids =
        reinterpret_cast<const std::int32_t*>(workspace.data(workspace.rank) + args.ids_offset);
    for_each_piece(args, [&](int piece, int, int source) {
        const std::uint32_t flag = lists.flag(source, piece);
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.goes_on = arrived(network, waiter, flag, source);
        }
        __syncthreads();
        if (!shared.goes_on) return false;
        const int count = takes == 0 ? 0 : lists.ends(source)[kGroups - 1];
        const bool landed = copy_piece(args, piece, source, count, [&](int at) {
            const std::int64_t token =
                std::int64_t{source} * args.tokens + lists.arriving(source)[at];
            const unsigned ranks =
                takes & wanting(workspace, all_ids + token * args.top_k, args.top_k, args.experts);
            const std::int64_t slot = (std::int64_t{source} * args.tokens + at) * args.row_bytes;
            copy_row(network.area + slot, args.row_bytes, ranks,
                     [&](int rank) { return workspace.data(rank) + slot; });
        });
        if (landed) {
            count_arrival(network, flag);
            set_here(args, flag, epoch);
        }
        return true;
    });
}

}  // namespace mkernel::cuda::moe
