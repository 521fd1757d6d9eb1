// The place of a row's token: among the own ones, or in the workspace, where other ranks' tokens arrive. `Args` of
// kernels have the fields workspace, tables, a (own tokens, row_bytes each) and waits (for other ranks' tokens).
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"

namespace mkernel::cuda::moe {

struct TokenPlace {
    bool own;
    std::int32_t number;  // among the own ones, or all
};

template <class Args>
__device__ inline TokenPlace token_place(const Args& args, int row) {
    const int token = args.tables.row_place()[row] / args.tables.top_k;
    const int number = token - args.workspace.rank * args.tables.tokens;
    const bool own = number >= 0 && number < args.tables.tokens;
    return {own, own ? number : token};
}

template <class Args>
__device__ inline const char* token_row(const Args& args, int row) {
    const TokenPlace place = token_place(args, row);
    const char* const base = place.own ? args.a : args.workspace.data(args.workspace.rank);
    return base + place.number * args.row_bytes;
}

// Waits until the tokens of other ranks that `rows` rows of one expert, at least one, from `first` on need
// are there: they are ordered by source. Called by one thread.
template <class Args>
__device__ inline void wait_for_tokens(const Args& args, const transport::DeviceWaiter& waiter,
                                       std::uint64_t epoch, int first, int rows) {
    if (!args.waits) return;
    const int own = args.tables.tokens * args.tables.top_k;
    const int last = args.tables.row_place()[first + rows - 1] / own;
    for (int s = args.tables.row_place()[first] / own; s <= last; ++s) {
        const auto source = static_cast<std::uint32_t>(s);
        if (s != args.workspace.rank && !waiter.until(args.workspace.flags(args.workspace.rank)[s],
                                                      epoch, {source, source, 0})) {
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
        const auto source = static_cast<std::uint32_t>((workspace.rank + step) % workspace.world);
        if (!waiter.until(workspace.flags(workspace.rank)[source], epoch, {source, source, 0})) {
            break;
        }
    }
}

}  // namespace mkernel::cuda::moe
