// The work of the kernels of home.hpp.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/home.hpp"
#include "backends/accelerators/cuda/kernels/moe/weighted_sum.cuh"

namespace mkernel::cuda::moe {

// Calls body(row, first of 8 elements) for all of `rows` rows, over the grid.
template <class Body>
__device__ void for_each_eight(std::int64_t rows, int width, Body&& body) {
    const std::int64_t eights = width / 8;
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < rows * eights;
         at += step) {
        body(at / eights, static_cast<int>(at % eights) * 8);
    }
}

// The flag of a piece of what comes by rank from rank s: of sums from another node, or hierarchically of its results for
// this node's relays, and, with the last piece, for this rank.
__device__ inline std::uint32_t piece_flag(const HomeArgs& args, int s, int piece) {
    return static_cast<std::uint32_t>(2 * args.workspace.world + s * args.pieces + piece);
}

__device__ inline Rails rails_in(const HomeArgs& args) {
    return rails_of(args.workspace, args.hierarchical);
}

// Returns true for a rank of another node that exchanges nothing with this one.
__device__ inline bool relayed_to(const HomeArgs& args, int other) {
    return args.hierarchical && !args.workspace.near(other) && !rails_in(args).puts_to(other);
}

// Waits until flag_of(s) of every other rank s signals this call; those of which it is negative count as there. Called by
// all threads of the block.
template <class FlagOf>
__device__ void wait_for_all(const HomeArgs& args, std::uint64_t epoch, FlagOf&& flag_of) {
    const Workspace& workspace = args.workspace;
    if (threadIdx.x == 0 && args.waits) {
        const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::compute_kernel);
        for (int step = 1; step < workspace.world; ++step) {
            const int source = (workspace.rank + step) % workspace.world;
            const std::int64_t flag = flag_of(source);
            if (flag < 0) continue;
            if (!waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                              {static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(source),
                               transport::kNoChunk})) {
                break;
            }
        }
    }
    __syncthreads();
}

// Waits until all results, or sums, that come to this rank are there.
__device__ inline void wait_for_results(const HomeArgs& args, std::uint64_t epoch) {
    wait_for_all(args, epoch, [&](int source) -> std::int64_t {
        if (relayed_to(args, source)) return -1;
        const bool pieces = args.hierarchical || !args.workspace.near(source);
        if (!pieces) return args.workspace.world + source;
        return piece_flag(args, source, args.pieces - 1);
    });
}

__device__ inline std::uint64_t epoch_of(const HomeArgs& args) {
    return args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
}

// Signals that flag to this node, as the last step of all threads of the block. Ranks of other nodes are signalled by what
// is put to them.
__device__ inline void tell(const HomeArgs& args, std::uint64_t epoch, std::uint32_t flag) {
    transport::fence_system();
    __syncthreads();
    if (threadIdx.x == 0 && args.waits) tell_peers(args.workspace, epoch, flag);
}
// Returns the piece that `first` is the first token of.
__device__ inline int piece_of(const HomeArgs& args) {
    return args.first / ((args.tables.tokens + args.pieces - 1) / args.pieces);
}
__device__ inline void finish(const HomeArgs& args, std::uint64_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    finish_call(args.workspace,
                waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel), epoch);
}

__device__ inline char* home_of(const HomeArgs& args, int rank) {
    return args.workspace.data(args.waits ? rank : args.workspace.rank) + args.rows_offset;
}

// Returns where sums of tokens of `source` start: in its workspace, or its relay's, those of this rank; for another node's
// rank, in the outbox.
__device__ inline char* sums_for(const HomeArgs& args, int source, int element_bytes) {
    const std::int64_t each = std::int64_t{args.tables.tokens} * args.width * element_bytes;
    const Workspace& workspace = args.workspace;
    if (!args.waits || workspace.near(source)) {
        return home_of(args, source) + workspace.rank * each;
    }
    if (args.hierarchical) {
        const Rails rails = rails_in(args);
        return home_of(args, rails.taker(source)) + rails.taken_as(source) * each;
    }
    return workspace.network.area + args.outbox_offset + source * each;
}

__device__ inline void refuse(Sums& sums) {
#pragma unroll
    for (float& each : sums.of) each = __int_as_float(0x7FC00000);
}

template <class Element>
__device__ void send_rows_of_call(const HomeArgs& args) {
    const std::uint64_t epoch = epoch_of(args);
    const int own = args.tables.tokens * args.tables.top_k;
    for_each_eight(args.tables.rows(), args.width, [&](std::int64_t row, int column) {
        const int place = args.tables.row_place()[row];
        const uint4 found = ptx::load_16(args.y + (row * args.width + column) * 2);
        ptx::store_16(
            home_of(args, place / own) + (std::int64_t{place % own} * args.width + column) * 2,
            found);
    });
    tell(args, epoch, args.workspace.world + args.workspace.rank);
}

// Returns the groups of experts of invariant results.
__device__ inline Groups groups_of(const HomeArgs& args) {
    return {args.groups, args.tables.world * args.tables.experts};
}

template <class Out, class In, bool kTree>
__device__ void sum_slots_of_call(const HomeArgs& args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_results(args, epoch);
    const Tables& tables = args.tables;
    const char* const home = args.workspace.data(args.workspace.rank) + args.rows_offset;
    const std::int64_t before = std::int64_t{args.workspace.rank} * tables.tokens * tables.top_k;
    const bool refused = tables.refused() != 0;
    for_each_eight(tables.tokens, args.width, [&](std::int64_t token, int column) {
        const std::int64_t first = token * tables.top_k;
        const std::int32_t* const ids = tables.ids() + before + first;
        Sums sums;
        const auto add = [&](int slot, Sums& to) {
            const std::int64_t place = first + slot;
            to.add<In>(args.weights[place], home + (place * args.width + column) * sizeof(In));
        };
        if constexpr (kTree) {
            const Groups groups = groups_of(args);
            Tree<In> tree;
            add_leaves(tree, groups, ids, tables.top_k, 0, groups.experts, add);
            sums.add(tree);
        } else {
            for (int slot = 0; slot < tables.top_k; ++slot) {
                if (ids[slot] >= 0) add(slot, sums);
            }
        }
        if (refused) refuse(sums);
        sums.store<Out>(args.out + (token * args.width + column) * sizeof(Out));
    });
    finish(args, epoch);
}

// Adds 8 results of a token of `source`, from `column` on, that are rows of this rank, in the order of slots, or their
// tree's root. Returns whether there are any.
template <class In, bool kTree>
__device__ bool add_rows(const HomeArgs& args, int source, std::int64_t token, int column,
                         Sums& sums) {
    const Tables& tables = args.tables;
    const auto* const theirs = reinterpret_cast<const float*>(
        args.workspace.data(args.workspace.rank) + args.weights_offset);
    const std::int64_t own = std::int64_t{tables.tokens} * tables.top_k;
    const std::int64_t number = source * std::int64_t{tables.tokens} + token;
    // In a view that exchanges nothing the own weights stand for those of all ranks.
    const float* const weights =
        source == args.workspace.rank || !args.waits ? args.weights : theirs + source * own;
    const std::int32_t* const rows = tables.place_row() + number * tables.top_k;
    bool any = false;
    if constexpr (kTree) {
        const int first = args.workspace.rank * tables.experts;
        Tree<In> tree;
        add_leaves(tree, groups_of(args), tables.ids() + number * tables.top_k, tables.top_k, first,
                   first + tables.experts, [&](int slot, Sums& leaf) {
                       if (rows[slot] < 0) return;  // refused
                       any = true;
                       leaf.add<In>(
                           weights[token * tables.top_k + slot],
                           args.y + (std::int64_t{rows[slot]} * args.width + column) * sizeof(In));
                   });
        sums.add(tree);
    } else {
        constexpr int kLoads = sizeof(In) == 2 ? 4 : 2;  // under way, of a token's results
        for (int slot = 0; slot < tables.top_k; slot += kLoads) {
            int row[kLoads];
            Eight<In> found[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) row[i] = slot + i < tables.top_k ? rows[slot + i] : -1;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (row[i] < 0) continue;
                found[i].load(args.y + (std::int64_t{row[i]} * args.width + column) * sizeof(In));
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (row[i] < 0) continue;
                any = true;
                sums.add(weights[token * tables.top_k + slot + i], found[i]);
            }
        }
    }
    return any;
}

template <class In, bool kTree>
__device__ void sum_rows_of_call(const HomeArgs& args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_all(args, epoch, [](int source) { return source; });
    const int world = args.tables.world;
    const std::int64_t some = std::int64_t{world} * (args.end - args.first);
    // The tokens of all ranks take turns, so that the link is used from the first to the last.
    for_each_eight(some, args.width, [&](std::int64_t turn, int column) {
        const auto source = static_cast<int>(turn % world);
        const std::int64_t token = args.first + turn / world;
        if (args.hierarchical && rails_in(args).puts_to(source)) return;  // relay_sums does these
        Sums sums;
        if (!add_rows<In, kTree>(args, source, token, column, sums)) return;
        char* const to = sums_for(args, source, sizeof(In));
        sums.store<In>(to + (token * args.width + column) * sizeof(In));
    });
    if (args.hierarchical) {
        tell(args, epoch, piece_flag(args, args.workspace.rank, piece_of(args)));
    } else if (args.end == args.tables.tokens) {
        tell(args, epoch, args.workspace.world + args.workspace.rank);
    }
}

// Returns the ranks that have results of a token of `source`, a bit each.
__device__ inline unsigned owners(const HomeArgs& args, int source, std::int64_t token) {
    const Tables& tables = args.tables;
    const std::int32_t* const ids =
        tables.ids() + (std::int64_t{source} * tables.tokens + token) * tables.top_k;
    unsigned ranks = 0;
    for (int slot = 0; slot < tables.top_k; ++slot) {
        if (ids[slot] >= 0) ranks |= 1u << ids[slot] / tables.experts;
    }
    return ranks;
}

// Adds 8 elements of `token` of slot `from` of what came home.
template <class In, class Terms>
__device__ void add_slot(const HomeArgs& args, int from, std::int64_t token, int column,
                         Terms& terms) {
    const std::int64_t at = std::int64_t{from} * args.tables.tokens + token;
    Eight<In> found;
    found.load(home_of(args, args.workspace.rank) +
               (at * args.width + column) * static_cast<int>(sizeof(In)));
    terms.add(found, from);
}

template <class In, bool kTree>
__device__ void relay_sums_of_call(const HomeArgs& args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_all(args, epoch, [&](int source) -> std::int64_t {
        if (!args.workspace.near(source)) return -1;
        return piece_flag(args, source, piece_of(args));
    });
    const Rails rails = rails_in(args);
    const std::int64_t some = std::int64_t{rails.peers()} * (args.end - args.first);
    for_each_eight(some, args.width, [&](std::int64_t turn, int column) {
        const auto number = static_cast<int>(turn % rails.peers());
        const int ward = rails.peer(number);
        const std::int64_t token = args.first + turn / rails.peers();
        const unsigned here = owners(args, ward, token) >> args.workspace.first;
        TreeOr<kTree, In, Sums> terms;
        for (int place = 0; place < rails.local; ++place) {
            if ((here >> place & 1) == 0) continue;
            const int from = ward / rails.local * rails.local + place;
            if (place != rails.place()) {
                add_slot<In>(args, from, token, column, terms);
                continue;
            }
            Sums own;
            Eight<In> rounded;  // as those of the neighbours are
            add_rows<In, kTree>(args, ward, token, column, own);
            own.store<In>(reinterpret_cast<char*>(rounded.v));
            terms.add(rounded, from);
        }
        if ((here & ((1u << rails.local) - 1)) == 0) return;
        Sums sums;
        sums.add(terms);
        const std::int64_t at = (number * std::int64_t{args.tables.tokens} + token) * args.width;
        sums.store<In>(args.workspace.network.area + args.outbox_offset +
                       (at + column) * static_cast<int>(sizeof(In)));
    });
}

// Adds the slots of those of `count` ranks from `first` on that have a bit in `ranks`.
template <class In, class Terms>
__device__ void add_slots(const HomeArgs& args, unsigned ranks, int first, int count,
                          std::int64_t token, int column, Terms& terms) {
    for (int rank = first; rank < first + count; ++rank) {
        if (ranks >> rank & 1) add_slot<In>(args, rank, token, column, terms);
    }
}

template <class Out, class In, bool kTree, bool kRelayed>
__device__ void sum_ranks_of_call(const HomeArgs& args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_results(args, epoch);
    const Tables& tables = args.tables;
    const bool refused = tables.refused() != 0;
    for_each_eight(tables.tokens, args.width, [&](std::int64_t token, int column) {
        const unsigned ranks = owners(args, args.workspace.rank, token);
        TreeOr<kTree, In, Sums> terms;
        if constexpr (!kRelayed) {
            add_slots<In>(args, ranks, 0, tables.world, token, column, terms);
        } else {
            const Rails rails = rails_in(args);
            for (int first = 0; first < tables.world; first += rails.local) {
                if (first == args.workspace.first) {
                    if constexpr (kTree) {
                        add_slots<In>(args, ranks, first, rails.local, token, column, terms);
                    } else {
                        Sums own;
                        add_slots<In>(args, ranks, first, rails.local, token, column, own);
                        terms.add(own);
                    }
                } else if ((ranks >> first & ((1u << rails.local) - 1)) != 0) {
                    add_slot<In>(args, first + rails.place(), token, column, terms);
                }
            }
        }
        Sums sums;
        sums.add(terms);
        if (refused) refuse(sums);
        sums.store<Out>(args.out + (token * args.width + column) * sizeof(Out));
    });
    finish(args, epoch);
}

}  // namespace mkernel::cuda::moe
