// The order in which clusters take the tiles of a matrix, so that those in flight share operands in
// L2: bands of `band` cluster rows, down the band first.
#pragma once

#include <cuda_runtime.h>

namespace mkernel::hopper {

struct Raster {
    int cluster_rows;  // tiles of (cluster x 128) rows
    int columns;       // tiles of kTileN columns
    int band;          // >= 1

    __host__ __device__ int tiles() const { return cluster_rows * columns; }

    __device__ void at(int index, int& cluster_row, int& column) const {
        const int first = index / (band * columns) * band;
        const int left = cluster_rows - first;
        const int height = left < band ? left : band;
        const int within = index - first * columns;
        column = within / height;
        cluster_row = first + within - column * height;
    }
};

}  // namespace mkernel::hopper
