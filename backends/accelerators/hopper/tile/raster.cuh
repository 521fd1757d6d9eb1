// In which order clusters take tiles.
#pragma once

#include <cuda_runtime.h>

namespace mkernel::hopper {

// Of one matrix, so that those in flight share operands in L2: bands of `band` cluster rows, down the
// band first.
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

// Of a matrix whose rows come from `world` ranks, one after the other, the own ones first: `ahead`
// columns of the own rows; then the other columns of everyone's rows, which share them in L2; then
// `ahead` columns of the others', rank by rank. With all columns ahead it is rank by rank throughout.
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

// Of a matrix whose rows belong to `world` owners, each with a raster of its own: the others' band 0;
// then, a band of columns at a time, the others' next and the own one before it; the own last one.
class OwnerOrder {
  public:
    __host__ __device__ OwnerOrder(const Raster& raster, int band_columns, int world)
        : raster_(raster),
          band_columns_(band_columns),
          bands_((raster.columns + band_columns - 1) / band_columns),
          others_(world - 1) {}

    // `step`: the owner, counted from this rank; `cluster_row` and `column` of its tiles.
    __host__ __device__ void at(int index, int& step, int& cluster_row, int& column) const {
        int band = 0;
        int within = index;
        step = 1;
        if (within >= others_ * tiles(0)) {
            within -= others_ * tiles(0);
            const int full = (others_ + 1) * tiles(0);
            int turn =
                least(within / full, bands_ > 2 ? bands_ - 2 : 0);  // those before it are alike
            within -= turn * full;
            if (turn + 1 < bands_ && within >= others_ * tiles(turn + 1) + tiles(turn)) {
                within -= others_ * tiles(turn + 1) + tiles(turn);
                ++turn;
            }
            const int ahead = turn + 1 < bands_ ? others_ * tiles(turn + 1) : 0;
            if (within < ahead) {
                band = turn + 1;
            } else {
                within -= ahead;
                band = turn;
                step = 0;
            }
        }
        if (step > 0) {
            step += within / tiles(band);
            within %= tiles(band);
        }
        Raster part = raster_;
        part.columns = width(band);
        part.at(within, cluster_row, column);
        column += band * band_columns_;
    }

  private:
    __host__ __device__ static int least(int a, int b) { return a < b ? a : b; }
    __host__ __device__ int width(int band) const {
        return least(band_columns_, raster_.columns - band * band_columns_);
    }
    __host__ __device__ int tiles(int band) const { return raster_.cluster_rows * width(band); }

    Raster raster_;
    int band_columns_;
    int bands_;
    int others_;
};

}  // namespace mkernel::hopper
