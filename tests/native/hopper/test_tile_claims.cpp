// A reduction whose clusters claim tiles (tile/claims.cuh) ends with any number of them running at a time, on
// any ranks; by strides it ends where all run, and not always where fewer do. A model of who waits for whom,
// with the kernel's order of tiles and its rules of exchange; nothing of it is timed.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "backends/accelerators/hopper/device/rails.cuh"
#include "backends/accelerators/hopper/tile/raster.cuh"

using mkernel::hopper::OwnerOrder;
using mkernel::hopper::Rails;
using mkernel::hopper::Raster;

namespace {

struct Call {
    int nodes, local;
    bool hierarchical;
    bool everywhere;  // AllReduce
    Raster raster;
    int panel_rows, panel_columns;
    int clusters;              // of each rank's kernel
    std::vector<int> running;  // at a time, by rank
    bool claims;

    [[nodiscard]] int world() const { return nodes * local; }
};

struct Place {
    int step, place;
};

// Numbers that one role of a cluster takes, one after the other, and, by claims, one ahead.
struct Taker {
    int now = -1, next = -1;  // none yet; not below the number of tiles: no more
};

struct Cluster {
    Taker tiles, results;
};

struct Rank {
    Rails rails;
    std::vector<Place> tiles, results;  // by number
    int claimed = 0, claimed_results = 0;
    std::vector<std::vector<bool>> parts, sums;  // that have come, by source and place
    std::vector<Cluster> clusters;
    std::vector<int> runs;  // clusters that do
    int begun = 0;
};

class Model {
  public:
    explicit Model(const Call& call) : call_(call) {
        for (int rank = 0; rank < call.world(); ++rank) {
            Rank made{.rails = {rank, call.nodes, call.local, call.hierarchical},
                      .tiles = {},
                      .results = {},
                      .parts = none(),
                      .sums = none(),
                      .clusters = std::vector<Cluster>(call.clusters),
                      .runs = {}};
            made.tiles = order(made.rails.relayed());
            made.results = order(made.rails.shared_results());
            ranks_.push_back(made);
        }
    }

    // Whether the call ends, on all ranks.
    bool ends() {
        bool moved = true;
        while (moved) {
            moved = false;
            for (Rank& rank : ranks_) moved = turn(rank) || moved;
        }
        return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
            return rank.runs.empty() && rank.begun == call_.clusters;
        });
    }

  private:
    [[nodiscard]] std::vector<std::vector<bool>> none() const {
        return std::vector<std::vector<bool>>(call_.world(),
                                              std::vector<bool>(call_.raster.tiles()));
    }

    [[nodiscard]] std::vector<Place> order(int relayed) const {
        OwnerOrder order(call_.raster, call_.panel_rows, call_.panel_columns, call_.world(),
                         relayed);
        std::vector<Place> found;
        for (int number = 0; number < call_.world() * call_.raster.tiles(); ++number) {
            int step = 0;
            int row = 0;
            int column = 0;
            int place = 0;
            order.at(number, step, row, column, place);
            found.push_back({step, place});
        }
        return found;
    }

    // Whether anything went on.
    bool turn(Rank& rank) {
        bool moved = false;
        const int most = call_.running[rank.rails.rank];
        while (static_cast<int>(rank.runs.size()) < most && rank.begun < call_.clusters) {
            rank.runs.push_back(rank.begun++);
            moved = true;
        }
        std::vector<int> left;
        for (const int number : rank.runs) {
            Cluster& cluster = rank.clusters[number];
            moved = goes_on(cluster.tiles, number, rank.claimed,
                            [&](int tile) { return computes(rank, rank.tiles[tile]); }) ||
                    moved;
            bool done = cluster.tiles.now >= all();
            if (call_.everywhere) {
                moved = goes_on(cluster.results, number, rank.claimed_results,
                                [&](int result) { return carries(rank, rank.results[result]); }) ||
                        moved;
                done = done && cluster.results.now >= all();
            }
            if (!done) left.push_back(number);
        }
        moved = moved || left.size() != rank.runs.size();
        rank.runs = left;
        return moved;
    }

    [[nodiscard]] int all() const { return call_.world() * call_.raster.tiles(); }

    // One tile at most. `does(number)`: whether nothing that it waits for is missing.
    template <class Does>
    bool goes_on(Taker& taker, int cluster, int& counter, Does&& does) {
        if (taker.now >= all()) return false;
        if (taker.now < 0) {
            taker.now = call_.claims ? counter++ : cluster;
            taker.next = call_.claims ? counter++ : cluster + call_.clusters;
            return true;
        }
        if (!does(taker.now)) return false;
        taker.now = taker.next;
        if (taker.now < all()) {
            taker.next = call_.claims ? counter++ : taker.now + call_.clusters;
        }
        return true;
    }

    bool computes(Rank& rank, const Place& tile) {
        const Rails& rails = rank.rails;
        const int owner = rails.owner(tile.step);
        for (int number = 0; number < rails.parts(tile.step); ++number) {
            if (!rank.parts[rails.part_of(owner, number)][tile.place]) return false;
        }
        if (owner != rails.rank) {
            const bool by_nic = rails.puts_to(owner);
            const int source = by_nic ? rails.rank : rails.taken_as(owner);
            ranks_[by_nic ? owner : rails.taker(owner)].parts[source][tile.place] = true;
            return true;
        }
        for (int step = 1; step < rails.local; ++step) share(rails.neighbour(step), owner, tile);
        for (int number = 0; number < rails.peers(); ++number) {
            share(rails.peer(number), owner, tile);
        }
        return true;
    }

    bool carries(Rank& rank, const Place& result) {
        const Rails& rails = rank.rails;
        const int owner = rails.result_owner(result.step);
        if (owner == rails.rank) return true;
        if (!rank.sums[owner][result.place]) return false;
        if (rails.hierarchical && rails.puts_to(owner)) {
            for (int step = 1; step < rails.local; ++step) {
                share(rails.neighbour(step), owner, result);
            }
        }
        return true;
    }

    void share(int at, int owner, const Place& tile) { ranks_[at].sums[owner][tile.place] = true; }

    Call call_;
    std::vector<Rank> ranks_;
};

bool ends(const Call& call) {
    return Model(call).ends();
}

// An AllReduce of 8192 x 8192 on two ranks, in panels of 8 x 8, with 66 clusters: 16 of them run on these.
Call large(bool claims, int first, int second) {
    return {.nodes = 1,
            .local = 2,
            .hierarchical = false,
            .everywhere = true,
            .raster = {16, 32, 8},
            .panel_rows = 8,
            .panel_columns = 8,
            .clusters = 66,
            .running = {first, second},
            .claims = claims};
}

bool fail(const char* what, const Call& call) {
    std::printf(
        "%s: %d x %d ranks, hierarchical %d, everywhere %d, %d x %d tiles in panels of %d x %d, "
        "%d clusters, of rank 0 %d run\n",
        what, call.nodes, call.local, call.hierarchical, call.everywhere, call.raster.cluster_rows,
        call.raster.columns, call.panel_rows, call.panel_columns, call.clusters, call.running[0]);
    return false;
}

// With any number of clusters running on rank 0, and as many or all of them on the others.
bool check(Call call) {
    bool right = true;
    for (const bool claims : {false, true}) {
        call.claims = claims;
        call.running.assign(call.world(), call.clusters);
        if (!ends(call)) right = fail("does not end with all clusters running", call);
    }
    for (int few = 1; few < call.clusters; ++few) {
        for (const bool only : {true, false}) {
            call.running.assign(call.world(), only ? call.clusters : few);
            call.running[0] = few;
            if (!ends(call)) right = fail("does not end with fewer running", call);
        }
    }
    return right;
}

}  // namespace

int main() {
    bool right = true;
    const int worlds[][3] = {{1, 2, 0}, {1, 3, 0}, {2, 2, 0}, {2, 2, 1}, {3, 2, 1}, {2, 3, 1}};
    for (const auto& [nodes, local, hierarchical] : worlds) {
        for (const bool everywhere : {false, true}) {
            for (const Raster& raster : {Raster{1, 1, 1}, Raster{3, 5, 2}, Raster{4, 8, 8}}) {
                for (int height = 1; height <= raster.cluster_rows; height += 2) {
                    for (int width = 1; width <= raster.columns; width += 3) {
                        for (const int clusters : {1, 3, 7}) {
                            right = check({.nodes = nodes,
                                           .local = local,
                                           .hierarchical = hierarchical != 0,
                                           .everywhere = everywhere,
                                           .raster = raster,
                                           .panel_rows = height,
                                           .panel_columns = width,
                                           .clusters = clusters,
                                           .running = {},
                                           .claims = true}) &&
                                    right;
                        }
                    }
                }
            }
        }
    }
    if (!ends(large(true, 16, 66)) || !ends(large(true, 16, 16))) {
        right = fail("does not end by claims", large(true, 16, 66));
    }
    if (ends(large(false, 16, 66)) || ends(large(false, 16, 16))) {
        right = fail("ends by strides, which shows that the model waits for nothing",
                     large(false, 16, 66));
    }
    std::printf("%s\n", right ? "right" : "wrong");
    return right ? 0 : 1;
}
