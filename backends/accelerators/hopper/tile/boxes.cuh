// The rows of a matrix as bulk tensor copies take them, in boxes of which none reaches far beyond the matrix: rows
// of a box that are beyond it are filled with zeros, which takes longer than to copy them (bench/hopper_notes.md).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

struct Boxes {
    CUtensorMap whole;
    CUtensorMap rest;  // boxes of as many rows as are left behind the last whole one
    int rest_rows;     // 0: none are
};

// A choice among them. What lies in shared memory behind its rows stays there.
struct Box {
    const CUtensorMap* map;
    int rows;  // 0: nothing is to be copied
};

// Returns the smaller box that has `rows` rows, or as many of them as `height`, that of whole boxes.
__device__ inline Box box_of(const Boxes& boxes, int height, int rows) {
    if (rows <= 0) return {&boxes.whole, 0};
    if (rows <= boxes.rest_rows) return {&boxes.rest, boxes.rest_rows};
    return {&boxes.whole, height};
}

}  // namespace mkernel::hopper
