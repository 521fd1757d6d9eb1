// The scales of e4m3 operands, as kernels take them.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

// The scales of a rank's rows of A and of all of B: `single`, one each; else by rows, [rows] and [N].
struct OperandScales {
    const float* own;
    const float* of_columns;
    bool single;
    std::uint64_t gathered_at;  // in the data area: what every rank has as `own`, by rank

    // Returns the number of scales of so many rows, which is also where that of row `rows` lies.
    [[nodiscard]] __device__ int of_rows(int rows) const { return single ? 0 : rows; }
};

}  // namespace mkernel::hopper
