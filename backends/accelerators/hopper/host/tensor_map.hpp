// Descriptions of tensors in device memory for bulk tensor copies.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mkernel::hopper {

inline constexpr std::uint64_t kElementBytes = 2;  // bfloat16, float16

// A tensor of 16-bit elements, packed, innermost dimension first; `depth` 0: two dimensions. The
// address and the length of a row (in bytes) are multiples of 16.
struct TensorExtent {
    std::uint64_t address;
    std::uint64_t width;
    std::uint64_t height;
    std::uint64_t depth = 0;
};

// Copies boxes of [box_height, 64], 128-byte-swizzled in shared memory. CudaError names the extent.
CUtensorMap tensor_map(const TensorExtent& extent, std::uint32_t box_height, bool half);

}  // namespace mkernel::hopper
