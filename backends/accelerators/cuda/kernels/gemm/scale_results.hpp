// Scaling of results that a library multiplied from e4m3 operands without their scales, row by row and column
// by column: for few rows that is faster than the library's product with such scales.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mkernel::cuda {

// The product out [rows, n] = products [rows, n] * of_rows [rows] * of_columns [n] in float32 (+ bias [n] of
// out's type), rounded once. All packed and aligned to 16 bytes; n is a multiple of 16.
struct ScaleResults {
    const float* products;
    const float* of_rows;
    const float* of_columns;
    const void* bias;  // null: none
    void* out;
    std::uint32_t rows, n;
    bool half;  // float16, else bfloat16
};

// Queues the scaling on the current device's `stream`; may be captured. std::invalid_argument; CudaError.
void scale_results(const ScaleResults& results, cudaStream_t stream);

}  // namespace mkernel::cuda
