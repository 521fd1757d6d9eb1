// The normalisation of rows of a sum: r = sum + residual, out = r / sqrt(mean(r^2) + eps) * weight, perhaps quantised.
#pragma once

namespace mkernel::cuda {

// The norm of rows [.., columns]; all addresses are multiples of 16.
struct RowNorm {
    const void* weight = nullptr;    // [columns]; null: rows are not normalised
    const void* residual = nullptr;  // null: there is none
    void* residual_out = nullptr;
    float eps = 0;
    void* quantised = nullptr;  // rows in e4m3, instead of 16-bit ones; null: there are none
    float* scales = nullptr;    // of these rows, one each
};

}  // namespace mkernel::cuda
