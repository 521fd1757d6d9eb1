// The scales of e4m3 operands, as kernels take them.
#pragma once

#include <cstdint>

namespace mkernel::hopper {

// The scales of a rank's rows of A and of all of B: `single`, one each; else by rows, [rows] and [N]; or,
// where `blocks` is not 0, by blocks of 128, [rows, blocks] and [N / 128 rounded up, blocks], with K = blocks
// * 128.
struct OperandScales {
    const float* own;
    const float* of_columns;
    bool single;
    int blocks;
    std::uint64_t gathered_at;  // in the data area: what every rank has as `own`, by rank

    // Returns the number of scales of so many rows, which is also where those of row `rows` begin.
    [[nodiscard]] __device__ std::int64_t of_rows(int rows) const {
        return single ? 0 : std::int64_t{rows} * (blocks > 0 ? blocks : 1);
    }
};

}  // namespace mkernel::hopper
