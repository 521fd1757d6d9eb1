// The tiles of the grouped product, cut from the rows of each expert: the last step of the routing.
#pragma once

#include "backends/accelerators/cuda/kernels/moe/routing.hpp"
#include "backends/accelerators/cuda/kernels/moe/runs.cuh"

namespace mkernel::cuda::moe {

// The rows of an expert that come from tokens of this rank.
struct OwnRows {
    int first, end;
};
__device__ inline OwnRows own_rows(const RoutingArgs& args, const int* before, const Runs& runs,
                                   int expert, int count, int all_runs) {
    const int* of_expert = before + std::int64_t{expert} * all_runs;
    const int next = (args.workspace.rank + 1) * runs.each;
    return {of_expert[args.workspace.rank * runs.each], next < all_runs ? of_expert[next] : count};
}

// Writes the tiles, by one warp. `total`: rows of each expert; `before`: rows of runs before each.
__device__ inline void write_tiles(const RoutingArgs& args, const int* total, const int* before,
                                   const Runs& runs, int all_runs) {
    const Tables& tables = args.tables;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Tile* const tiles = tables.tiles();
    const auto cut = [&](int at, int expert, int first, int end) {
        for (; first < end; first += kTileRows, ++at) {
            tiles[at] = {expert, first, min(kTileRows, end - first), 0};
            tables.permuted()[at].value = 0;
        }
        return at;
    };
    int written = 0;
    for (const bool early : {true, false}) {
        int seen = 0;  // tiles of own rows, of the experts before
        int rows_before = 0;
        for (int first = 0; first < tables.experts; first += 32) {
            const int expert = first + lane;
            const int count = expert < tables.experts ? total[expert] : 0;
            OwnRows own{0, 0};
            if (count > 0) own = own_rows(args, before, runs, expert, count, all_runs);
            int all = 0;
            const int row = rows_before + sum_before(count, all);
            rows_before += all;
            const int whole = (own.end - own.first) / args.early_rows * args.early_rows;
            const int whole_tiles = (whole + kTileRows - 1) / kTileRows;
            const int place = seen + sum_before(whole_tiles, all);
            seen += all;
            const int mine = min(max(args.early - place, 0) * kTileRows, whole);
            // The tiles of the first rank go from its first row on, those of the others up to its last: one
            // rest less.
            const int from = own.first == 0 || mine == 0 ? row : row + own.end - mine;
            if (early) {
                cut(min(place, args.early), expert, from, from + mine);
                written = min(seen, args.early);
            } else {
                const int pieces = (from - row + kTileRows - 1) / kTileRows +
                                   (row + count - from - mine + kTileRows - 1) / kTileRows;
                const int at = written + sum_before(pieces, all);
                cut(cut(at, expert, row, from), expert, from + mine, row + count);
                written += all;
            }
        }
    }
    if (lane == 0) tiles[written] = {-1, 0, 0, 0};
}

}  // namespace mkernel::cuda::moe
