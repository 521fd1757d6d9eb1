// The place of a row's token: among the own ones, or in the workspace, where other ranks' tokens arrive. `Args` of
// kernels have the fields workspace, tables, a (own tokens, row_bytes each), waits (for other ranks' tokens) and
// crossing (those of other nodes, which lie and come in the order of lists).
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/crossing_lists.hpp"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"

namespace mkernel::cuda::moe {

struct TokenPlace {
    bool own;
    std::int32_t number;  // among the own ones, or all
};

template <class Args>
__device__ inline bool crosses(const Args& args, int source) {
    return args.crossing.pieces > 0 && !args.workspace.near(source);
}
template <class Args>
__device__ inline CrossingLists lists_for(const Args& args) {
    char* const data = args.workspace.data(args.workspace.rank);
    return {reinterpret_cast<std::int32_t*>(data + args.crossing.offset), args.tables.world,
            args.tables.tokens, args.crossing.pieces};
}

template <class Args>
__device__ inline TokenPlace token_place(const Args& args, int row) {
    const int token = args.tables.row_place()[row] / args.tables.top_k;
    const int number = token - args.workspace.rank * args.tables.tokens;
    const bool own = number >= 0 && number < args.tables.tokens;
    if (own) return {true, number};
    const int source = token / args.tables.tokens;
    if (!crosses(args, source)) return {false, token};
    const int before = source * args.tables.tokens;
    return {false, before + lists_for(args).place(source, token - before)};
}

template <class Args>
__device__ inline const char* token_row(const Args& args, int row) {
    const TokenPlace place = token_place(args, row);
    const char* const base = place.own ? args.a : args.workspace.data(args.workspace.rank);
    return base + place.number * args.row_bytes;
}

// Waits until the tokens of other ranks that `rows` rows of one expert, at least one, from `first` on need
// are there: they are ordered by source. Called by one thread.
// Those of another node have all come with the last piece that has any of the expert's.
template <class Args>
__device__ inline void wait_for_tokens(const Args& args, const transport::DeviceWaiter& waiter,
                                       std::uint64_t epoch, int first, int rows) {
    if (!args.waits) return;
    const int own = args.tables.tokens * args.tables.top_k;
    const int last = args.tables.row_place()[first + rows - 1] / own;
    for (int s = args.tables.row_place()[first] / own; s <= last; ++s) {
        if (s == args.workspace.rank) continue;
        auto flag = static_cast<std::uint32_t>(s);
        int piece = 0;
        if (crosses(args, s)) {
            const CrossingLists lists = lists_for(args);
            const int expert = args.tables.ids()[args.tables.row_place()[first]] -
                               args.workspace.rank * args.tables.experts;
            piece = lists.last_piece(s, expert, args.tables.experts);
            flag = lists.flag(s, piece);
        }
        if (!waiter.until(
                args.workspace.flags(args.workspace.rank)[flag], epoch,
                {flag, static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(piece)})) {
            break;
        }
    }
}

// Waits until the tokens of all other ranks are there, whether rows need them or not: if a rank ended the
// call before that, the rest would land in memory of a later call, under that one's flag. Called by one
// thread.
template <class Args>
__device__ inline void wait_for_all_tokens(const Args& args, const transport::DeviceWaiter& waiter,
                                           std::uint64_t epoch) {
    if (!args.waits) return;
    const Workspace& workspace = args.workspace;
    for (int step = 1; step < workspace.world; ++step) {
        const int s = (workspace.rank + step) % workspace.world;
        const int piece = crosses(args, s) ? args.crossing.pieces - 1 : 0;
        const std::uint32_t flag =
            crosses(args, s) ? lists_for(args).flag(s, piece) : static_cast<std::uint32_t>(s);
        if (!waiter.until(
                workspace.flags(workspace.rank)[flag], epoch,
                {flag, static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(piece)})) {
            break;
        }
    }
}

}  // namespace mkernel::cuda::moe
