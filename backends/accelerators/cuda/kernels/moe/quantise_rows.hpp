// e4m3 rows as experts take them: each row with the scales of its blocks of 128 behind it, which so go where the
// row goes.
//
// Data flow: rows of 16 bits ──half a warp a block, read once──▶ largest element ──▶ scale, elements in e4m3;
//   rows that are e4m3 already ──▶ copied, their scales behind them
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mkernel::cuda::moe {

// The rows x [rows, width], packed, `width` a multiple of 128, and where they go: [rows, row_bytes], `row_bytes` a
// multiple of 16, the padding zeros. All addresses are aligned to 16 bytes.
struct QuantiseArgs {
    const char* x;
    const float* scales;  // of e4m3 x: [rows, width / 128]; null: x has 16 bits, and is quantised
    char* out;
    std::int32_t rows, width, row_bytes;
    bool half;  // float16, else bfloat16
};

// Queues it on the current device's `stream`; may be captured. CudaError.
void quantise_rows(const QuantiseArgs& args, cudaStream_t stream);

}  // namespace mkernel::cuda::moe
