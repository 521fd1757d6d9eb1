// The scales of e4m3 operands, by which a rank's sums are multiplied.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/operand_scales.cuh"

namespace mkernel::hopper {

// The scales of 8 sums of a row, loaded while the sums are added up; empty for operands that have none.
template <bool kScaled>
class FewScales {
  public:
    __device__ void load(const OperandScales& scales, int row, int column) {
        if constexpr (kScaled) {
            of_row_ = scales.own[scales.of_rows(row)];
            if (scales.single) {
                const float one = *scales.of_columns;
                of_columns_[0] = of_columns_[1] = {one, one, one, one};
            } else {
                const auto* const at = reinterpret_cast<const float4*>(scales.of_columns + column);
                of_columns_[0] = at[0];
                of_columns_[1] = at[1];
            }
        }
    }
    __device__ void multiply(float (&sum)[8]) const {
        if constexpr (kScaled) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float by[4] = {of_columns_[half].x, of_columns_[half].y, of_columns_[half].z,
                                     of_columns_[half].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[4 * half + i] *= by[i];
                    sum[4 * half + i] *= of_row_;
                }
            }
        }
    }

  private:
    float of_row_;
    float4 of_columns_[2];
};

}  // namespace mkernel::hopper
