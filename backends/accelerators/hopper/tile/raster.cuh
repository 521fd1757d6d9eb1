// The order in which clusters take tiles.
#pragma once

#include <cuda_runtime.h>

#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

// The tiles of one matrix, in bands of `band` cluster rows, down the band first: tiles in flight
// share operands in L2.
struct Raster {
    int cluster_rows;  // tiles of (cluster x 128) rows
    int columns;       // tiles of kTileN columns
    int band;          // >= 1

    __host__ __device__ int tiles() const { return cluster_rows * columns; }

    __host__ __device__ void at(int index, int& cluster_row, int& column) const {
        const int first = index / (band * columns) * band;
        const int left = cluster_rows - first;
        const int height = left < band ? left : band;
        const int within = index - first * columns;
        column = within / height;
        cluster_row = first + within - column * height;
    }
};

// The rows of clusters of a matrix that `world` owners share: `each` has so many, as long as there are any.
struct OwnedRows {
    int each, all;

    __host__ __device__ int of(int owner) const {
        const int left = all - owner * each;
        return left < 0 ? 0 : left < each ? left : each;
    }
};

// The tiles of a matrix whose rows belong to `world` owners, each with a raster of its own that is
// cut into panels, numbered down a band of columns: the others' panel 0; then, panel by panel, the
// others' next and the own one before it; the own last one. The last `relayed` of the others form a stage of
// their own between the two, also one panel after the previous stage, since they wait for it on other ranks,
// as the own ones do for them. `raster`: of an owner that has as many rows as any; where owners have fewer,
// owner `rank + step`, modulo `world`, is that of step `step`.
class OwnerOrder {
  public:
    __host__ __device__ OwnerOrder(const Raster& raster, int panel_rows, int panel_columns,
                                   int world, int rank, int cluster_rows, int relayed = 0)
        : raster_(raster),
          rows_{raster.cluster_rows, cluster_rows},
          panel_rows_(panel_rows),
          panel_columns_(panel_columns),
          down_((raster.cluster_rows + panel_rows - 1) / panel_rows),
          panels_(down_ * ((raster.columns + panel_columns - 1) / panel_columns)),
          world_(world),
          rank_(rank),
          others_(world - 1 - relayed),
          relayed_(relayed) {}

    __host__ __device__ int tiles() const { return rows_.all * raster_.columns; }

    // Returns `step`: the owner, counted from this rank; `cluster_row` and `column` of its tiles; `place`: in
    // the order of this owner's tiles, which is the same on all ranks. To be called in rising order of
    // `index`.
    __host__ __device__ void at(int index, int& step, int& cluster_row, int& column, int& place) {
        for (int tiles = turn_tiles(); index - first_ >= tiles; tiles = turn_tiles()) {
            first_ += tiles;
            ++turn_;
        }
        place = index - first_;
        step = first_step();
        Raster part = panel(step);
        while (place >= part.tiles()) {
            place -= part.tiles();
            part = panel(++step);
        }
        part.at(place, cluster_row, column);
        const int left = number() / down_ * panel_columns_;
        place += left * rows_of(step) + first_row() * part.columns;  // the panels before
        cluster_row += first_row();
        column += left;
    }

  private:
    __host__ __device__ static int least(int a, int b) { return a < b ? a : b; }

    // Turns, one for each stage in a round: the others' panel, the relayed ones' previous panel, the own one
    // before that; without relayed ones the others' panel and the own previous one.
    __host__ __device__ int stages() const { return relayed_ > 0 ? 3 : 2; }
    __host__ __device__ int stage() const { return turn_ % stages(); }
    __host__ __device__ int number() const { return turn_ / stages() - stage(); }
    __host__ __device__ bool is_own() const { return stage() == stages() - 1; }
    __host__ __device__ int first_step() const { return is_own() ? 0 : 1 + stage() * others_; }
    __host__ __device__ int turn_tiles() const {
        if (number() < 0 || number() >= panels_) return 0;
        const int end = first_step() + (is_own() ? 1 : stage() == 0 ? others_ : relayed_);
        int tiles = 0;
        for (int step = first_step(); step < end; ++step) tiles += panel(step).tiles();
        return tiles;
    }
    __host__ __device__ int rows_of(int step) const {
        const int owner = rank_ + step;
        return rows_.of(owner < world_ ? owner : owner - world_);
    }
    __host__ __device__ int first_row() const { return number() % down_ * panel_rows_; }
    // Returns this turn's panel of an owner.
    __host__ __device__ Raster panel(int step) const {
        const int rows = rows_of(step) - first_row();
        return {rows < 0 ? 0 : least(panel_rows_, rows),
                least(panel_columns_, raster_.columns - number() / down_ * panel_columns_),
                raster_.band};
    }

    Raster raster_;
    OwnedRows rows_;
    int panel_rows_, panel_columns_;
    int down_;  // panels one below the other
    int panels_;
    int world_, rank_;
    int others_, relayed_;
    int turn_ = 0;
    int first_ = 0;  // index of the turn's first tile
};

}  // namespace mkernel::hopper
