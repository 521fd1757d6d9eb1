// In which order clusters take tiles.
#pragma once

#include <cuda_runtime.h>

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

// The tiles of a matrix whose rows come from `world` ranks, one after the other, the own ones
// first: `ahead` columns of the own rows; then the other columns of everyone's rows, which share
// them in L2; then `ahead` columns of the others', rank by rank. With all columns ahead it is rank
// by rank throughout.
class ArrivalOrder {
  public:
    __host__ __device__ ArrivalOrder(const Raster& raster, int ahead, int world)
        : rows_(raster.cluster_rows),
          band_(raster.band),
          ahead_(ahead),
          others_(raster.columns - ahead),
          world_(world) {}

    // `step`: the rank, counted from this one; `cluster_row` and `column` of its tiles.
    __host__ __device__ void at(int index, int& step, int& cluster_row, int& column) const {
        const int first = rows_ * ahead_;
        const int together = world_ * rows_ * others_;
        step = 0;
        if (index >= first && index < first + together) {
            Raster{world_ * rows_, others_, band_}.at(index - first, cluster_row, column);
            step = cluster_row / rows_;
            cluster_row -= step * rows_;
            column += ahead_;
            return;
        }
        if (index >= first) {
            index -= together;
            step = index / first;
            index -= step * first;
        }
        Raster{rows_, ahead_, band_}.at(index, cluster_row, column);
    }

  private:
    int rows_, band_, ahead_, others_, world_;
};

// The tiles of a matrix whose rows belong to `world` owners, each with a raster of its own that is
// cut into panels, numbered down a band of columns: the others' panel 0; then, panel by panel, the
// others' next and the own one before it; the own last one. Of the others the last `relayed` form a stage of
// their own between the two, also one panel behind the stage before, since they wait for it on other
// ranks, as the own ones do for them.
class OwnerOrder {
  public:
    __host__ __device__ OwnerOrder(const Raster& raster, int panel_rows, int panel_columns,
                                   int world, int relayed = 0)
        : raster_(raster),
          panel_rows_(panel_rows),
          panel_columns_(panel_columns),
          down_((raster.cluster_rows + panel_rows - 1) / panel_rows),
          panels_(down_ * ((raster.columns + panel_columns - 1) / panel_columns)),
          others_(world - 1 - relayed),
          relayed_(relayed) {}

    // `step`: the owner, counted from this rank; `cluster_row` and `column` of its tiles; `place`: in the
    // order of this owner's tiles, which is the same on all ranks. To be asked for in rising order of
    // `index`.
    __host__ __device__ void at(int index, int& step, int& cluster_row, int& column, int& place) {
        for (int tiles = turn_tiles(); index - first_ >= tiles; tiles = turn_tiles()) {
            first_ += tiles;
            ++turn_;
        }
        const Raster part = panel(number());
        const int within = index - first_;
        step = stage() == stages() - 1 ? 0 : 1 + within / part.tiles() + stage() * others_;
        place = within % part.tiles();
        part.at(place, cluster_row, column);
        const int row = number() % down_ * panel_rows_;
        const int left = number() / down_ * panel_columns_;
        place += left * raster_.cluster_rows + row * part.columns;  // the panels before
        cluster_row += row;
        column += left;
    }

  private:
    __host__ __device__ static int least(int a, int b) { return a < b ? a : b; }

    // Turns, a round of one a stage after the other: the others' panel, the relayed ones' before it, the own
    // one before that; without relayed ones the others' and the own one before.
    __host__ __device__ int stages() const { return relayed_ > 0 ? 3 : 2; }
    __host__ __device__ int stage() const { return turn_ % stages(); }
    __host__ __device__ int number() const { return turn_ / stages() - stage(); }
    __host__ __device__ int turn_tiles() const {
        if (number() < 0 || number() >= panels_) return 0;
        const int owners = stage() == 0 ? others_ : stage() == stages() - 1 ? 1 : relayed_;
        return owners * panel(number()).tiles();
    }
    __host__ __device__ Raster panel(int number) const {
        return {least(panel_rows_, raster_.cluster_rows - number % down_ * panel_rows_),
                least(panel_columns_, raster_.columns - number / down_ * panel_columns_),
                raster_.band};
    }

    Raster raster_;
    int panel_rows_, panel_columns_;
    int down_;  // panels one below the other
    int panels_;
    int others_, relayed_;
    int turn_ = 0;
    int first_ = 0;  // index of the turn's first tile
};

}  // namespace mkernel::hopper
