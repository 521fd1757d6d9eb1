// Every tile of every owner is taken once. Reductions: no rank waits for a part that comes after what
// waits; an owner's tiles are numbered in the order in which they are taken. AllGather: own rows go ahead, and
// with all columns ahead ranks follow one another. Shares: each step of K of each tile is one share's, only
// tiles of a last wave that is not full are cut, and no share waits for one that comes after it.
#include <cstdio>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/tile/raster.cuh"
#include "backends/accelerators/hopper/tile/shares.cuh"

using mkernel::hopper::ArrivalOrder;
using mkernel::hopper::OwnerOrder;
using mkernel::hopper::Raster;
using mkernel::hopper::Share;
using mkernel::hopper::Shares;

namespace {

// Step, cluster row, column → place in the order. Returns false where a tile is out of range or comes
// twice.
void take(ArrivalOrder& order, int index, int& step, int& row, int& column) {
    order.at(index, step, row, column);
}
void take(OwnerOrder& order, int index, int& step, int& row, int& column) {
    int place = 0;
    order.at(index, step, row, column, place);
}

template <class Order>
bool places(Order order, const Raster& raster, int world,
            std::map<std::tuple<int, int, int>, int>& found) {
    for (int index = 0; index < world * raster.tiles(); ++index) {
        int step = -1;
        int row = -1;
        int column = -1;
        take(order, index, step, row, column);
        const bool inside = step >= 0 && step < world && row >= 0 && row < raster.cluster_rows &&
                            column >= 0 && column < raster.columns;
        if (!inside || !found.emplace(std::tuple{step, row, column}, index).second) return false;
    }
    return true;
}

bool check(const Raster& raster, int panel_rows, int panel_columns, int world) {
    std::map<std::tuple<int, int, int>, int> place;
    if (!places(OwnerOrder(raster, panel_rows, panel_columns, world), raster, world, place))
        return false;
    // The own tile at (row, column) waits for the other ranks' parts of it. Each of them has it at
    // another step; a rank that waits may hold up what it has not yet sent, so all parts of a tile
    // must come before the own one, at every step.
    for (int row = 0; row < raster.cluster_rows; ++row) {
        for (int column = 0; column < raster.columns; ++column) {
            for (int step = 1; step < world; ++step) {
                if (place[{step, row, column}] > place[{0, row, column}]) return false;
            }
        }
    }
    return true;
}

// Of `relayed` owners, the last steps, the tiles wait for what other ranks have of them at earlier steps;
// the own ones wait for those.
bool check_relayed(const Raster& raster, int panel_rows, int panel_columns, int world,
                   int relayed) {
    std::map<std::tuple<int, int, int>, int> place;
    if (!places(OwnerOrder(raster, panel_rows, panel_columns, world, relayed), raster, world,
                place))
        return false;
    for (int row = 0; row < raster.cluster_rows; ++row) {
        for (int column = 0; column < raster.columns; ++column) {
            for (int late = world - relayed; late < world; ++late) {
                const int at = place[{late, row, column}];
                if (at > place[{0, row, column}]) return false;
                for (int step = 1; step < world - relayed; ++step) {
                    if (place[{step, row, column}] > at) return false;
                }
            }
        }
    }
    return true;
}

// An owner's tiles are numbered in the order in which they are taken, the same one at every step: by
// counting them.
bool check_numbers(const Raster& raster, int panel_rows, int panel_columns, int world,
                   int relayed) {
    OwnerOrder order(raster, panel_rows, panel_columns, world, relayed);
    std::vector<int> taken(world);
    std::map<std::pair<int, int>, int> numbers;
    for (int index = 0; index < world * raster.tiles(); ++index) {
        int step = -1;
        int row = -1;
        int column = -1;
        int place = -1;
        order.at(index, step, row, column, place);
        if (place != taken[step]++) return false;
        const auto [known, fresh] = numbers.emplace(std::pair{row, column}, place);
        if (!fresh && known->second != place) return false;
    }
    return true;
}

bool check_arrivals(const Raster& raster, int ahead, int world) {
    std::map<std::tuple<int, int, int>, int> place;
    if (!places(ArrivalOrder(raster, ahead, world), raster, world, place)) return false;
    for (const auto& [tile, at] : place) {
        const auto [step, row, column] = tile;
        const bool first = step == 0 && column < ahead;
        if (first != (at < raster.cluster_rows * ahead)) return false;
        if (ahead < raster.columns || at / raster.tiles() == step) continue;
        return false;
    }
    // Those in flight together share a column: it is left only when a band of everyone's rows is done.
    const int rows = world * raster.cluster_rows;
    const int height = rows < raster.band ? rows : raster.band;
    for (int column = ahead; column < raster.columns; ++column) {
        const int begin = place[{0, 0, column}];
        for (int row = 0; row < height; ++row) {
            if (place[{row / raster.cluster_rows, row % raster.cluster_rows, column}] !=
                begin + row)
                return false;
        }
    }
    return true;
}

bool check_shares(int tiles, int clusters, int splits, int steps) {
    const Shares shares(tiles, clusters, splits);
    std::vector<int> done(tiles);    // steps of K, in order
    std::vector<int> pieces(tiles);  // shares
    std::vector<bool> kept(shares.kept());
    int before = 0;
    for (int index = 0; index < shares.count(); ++index) {
        const Share share = shares.at(index);
        if (share.tile < before || share.tile >= tiles) return false;
        before = share.tile;
        if (share.split != pieces[share.tile]++ || share.first(steps) != done[share.tile]) {
            return false;
        }
        done[share.tile] = share.end(steps);
        if (share.is_last() != (pieces[share.tile] == share.splits)) return false;
        if (!share.is_last()) {
            const int place = share.kept + share.split;
            if (place < 0 || place >= shares.kept() || kept[place]) return false;
            kept[place] = true;
        }
        // What its last share adds lies where the others were told to keep it.
        for (int split = 0; share.is_last() && split < share.split; ++split) {
            if (!kept[share.kept + split]) return false;
        }
    }
    for (int tile = 0; tile < tiles; ++tile) {
        const bool is_cut = splits > 1 && tile >= tiles / clusters * clusters;
        if (done[tile] != steps || pieces[tile] != (is_cut ? splits : 1)) return false;
    }
    return true;
}

}  // namespace

int main() {
    for (int tiles = 0; tiles <= 30; ++tiles) {
        for (int clusters = 1; clusters <= 12; ++clusters) {
            for (int splits = 1; splits <= 4; ++splits) {
                for (const int steps : {1, 2, 3, 7, 64}) {
                    if (check_shares(tiles, clusters, splits, steps)) continue;
                    std::printf("%d tiles, %d clusters, %d splits, %d steps\n", tiles, clusters,
                                splits, steps);
                    return 1;
                }
            }
        }
    }
    for (int world = 1; world <= 5; ++world) {
        for (int rows = 1; rows <= 6; ++rows) {
            for (int columns = 1; columns <= 9; ++columns) {
                for (int width = 1; width <= columns; ++width) {
                    for (int band = 1; band <= 3; ++band) {
                        bool right = check_arrivals({rows, columns, band}, width, world);
                        for (int height = 1; height <= rows; ++height) {
                            right = right && check({rows, columns, band}, height, width, world);
                            for (int relayed = 0; relayed < world; ++relayed) {
                                right = right && check_numbers({rows, columns, band}, height, width,
                                                               world, relayed);
                            }
                            for (int relayed = 1; relayed < world; ++relayed) {
                                right = right && check_relayed({rows, columns, band}, height, width,
                                                               world, relayed);
                            }
                        }
                        if (right) continue;
                        std::printf(
                            "world %d, %d x %d tiles, panels of %d columns, raster band %d\n",
                            world, rows, columns, width, band);
                        return 1;
                    }
                }
            }
        }
    }
    return 0;
}
