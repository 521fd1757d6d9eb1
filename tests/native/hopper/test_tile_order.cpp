// Every tile of every owner is taken once. Reductions: no rank waits for a part that comes after what
// waits; an owner's tiles are numbered in the order in which they are taken. Where the last owners have fewer
// rows, only those are taken, and calls of any number of clusters end.
#include <cstdio>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/tile/raster.cuh"

using mkernel::hopper::OwnerOrder;
using mkernel::hopper::Raster;

namespace {

// Step, cluster row, column → place in the order. Returns false where a tile is out of range or comes
// twice.
bool places(OwnerOrder order, const Raster& raster, int world,
            std::map<std::tuple<int, int, int>, int>& found) {
    for (int index = 0; index < world * raster.tiles(); ++index) {
        int step = -1;
        int row = -1;
        int column = -1;
        int place = 0;
        order.at(index, step, row, column, place);
        const bool inside = step >= 0 && step < world && row >= 0 && row < raster.cluster_rows &&
                            column >= 0 && column < raster.columns;
        if (!inside || !found.emplace(std::tuple{step, row, column}, index).second) return false;
    }
    return true;
}

// Of owners that all have as many rows.
OwnerOrder even(const Raster& raster, int panel_rows, int panel_columns, int world,
                int relayed = 0) {
    return {raster, panel_rows, panel_columns, world, 0, world * raster.cluster_rows, relayed};
}

bool check(const Raster& raster, int panel_rows, int panel_columns, int world) {
    std::map<std::tuple<int, int, int>, int> place;
    if (!places(even(raster, panel_rows, panel_columns, world), raster, world, place)) return false;
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
    if (!places(even(raster, panel_rows, panel_columns, world, relayed), raster, world, place)) {
        return false;
    }
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
    OwnerOrder order = even(raster, panel_rows, panel_columns, world, relayed);
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

struct Taken {
    int owner, row, column, place;
};

std::vector<Taken> taken_by(int rank, const Raster& raster, int panel_rows, int panel_columns,
                            int world, int cluster_rows) {
    OwnerOrder order(raster, panel_rows, panel_columns, world, rank, cluster_rows);
    std::vector<Taken> found(order.tiles());
    for (int index = 0; index < order.tiles(); ++index) {
        Taken& tile = found[index];
        int step = 0;
        order.at(index, step, tile.row, tile.column, tile.place);
        tile.owner = (rank + step) % world;
    }
    return found;
}

// Of `cluster_rows` in all. Ranks of `clusters` clusters take what does not wait until all are done: an own tile
// waits for every other rank's part of it.
bool check_uneven(const Raster& raster, int panel_rows, int panel_columns, int world,
                  int cluster_rows, int clusters) {
    using Key = std::tuple<int, int, int>;
    std::vector<std::vector<Taken>> ranks;
    std::map<Key, int> numbers, parts;
    for (int rank = 0; rank < world; ++rank) {
        ranks.push_back(taken_by(rank, raster, panel_rows, panel_columns, world, cluster_rows));
        std::vector<int> count(world);
        for (const Taken& tile : ranks.back()) {
            const bool there = tile.owner * raster.cluster_rows + tile.row < cluster_rows;
            if (!there || tile.row >= raster.cluster_rows || tile.column >= raster.columns) {
                return false;
            }
            if (tile.place != count[tile.owner]++) return false;
            const Key key{tile.owner, tile.row, tile.column};
            if (numbers.emplace(key, tile.place).first->second != tile.place) return false;
        }
        if (static_cast<int>(numbers.size()) != cluster_rows * raster.columns) return false;
    }
    std::vector<std::vector<std::size_t>> next(world, std::vector<std::size_t>(clusters));
    for (int rank = 0; rank < world; ++rank) {
        for (int cluster = 0; cluster < clusters; ++cluster) next[rank][cluster] = cluster;
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < world; ++rank) {
            for (std::size_t& at : next[rank]) {
                if (at >= ranks[rank].size()) continue;
                const Taken& tile = ranks[rank][at];
                int& sent = parts[{tile.owner, tile.row, tile.column}];
                if (tile.owner != rank) {
                    ++sent;
                } else if (sent < world - 1) {
                    continue;
                }
                at += clusters;
                moved = true;
            }
        }
    }
    for (int rank = 0; rank < world; ++rank) {
        for (const std::size_t at : next[rank]) {
            if (at < ranks[rank].size()) return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    for (int world = 1; world <= 5; ++world) {
        for (int rows = 1; rows <= 6; ++rows) {
            for (int columns = 1; columns <= 9; ++columns) {
                for (int width = 1; width <= columns; ++width) {
                    for (int band = 1; band <= 3; ++band) {
                        bool right = true;
                        for (int height = 1; height <= rows; ++height) {
                            right = right && check({rows, columns, band}, height, width, world);
                            for (int all = 1; all <= world * rows && columns <= 5; ++all) {
                                right = right && check_uneven({rows, columns, band}, height, width,
                                                              world, all, 1 + (all + width) % 4);
                            }
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
