// Descriptions of tensors in device memory for bulk tensor copies.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/tile/boxes.cuh"

namespace mkernel::hopper {

inline constexpr std::uint64_t kElementBytes = 2;  // bfloat16, float16

// The type of a tensor's elements. e4m3 elements are 8 bits wide, the others 16.
enum class ElementType : std::uint8_t { bfloat16, float16, e4m3 };
inline constexpr std::uint64_t bytes_of(ElementType type) {
    return type == ElementType::e4m3 ? 1 : kElementBytes;
}

// A tensor, innermost dimension first; `depth` 0: two dimensions. `pitch`: elements from one row to the next;
// 0: rows are packed. The address and the pitch (in bytes) are multiples of 16, and the rows after the first
// `height` begin where the next row would.
struct TensorExtent {
    std::uint64_t address;
    std::uint64_t width;
    std::uint64_t height;
    std::uint64_t depth = 0;
    std::uint64_t pitch = 0;
};

// Returns the map by which boxes of [box_height, 128 bytes] are copied, 128-byte-swizzled in shared memory.
// CudaError names the extent.
CUtensorMap tensor_map(const TensorExtent& extent, std::uint32_t box_height, ElementType type);
inline CUtensorMap tensor_map(const TensorExtent& extent, std::uint32_t box_height, bool half) {
    return tensor_map(extent, box_height, half ? ElementType::float16 : ElementType::bfloat16);
}

// Returns the maps of whole boxes and of what is left where so many `rows` go along a whole number of them.
Boxes boxes_of(const TensorExtent& extent, int box_height, int rows, ElementType type);

// Rows of `width` elements, of `rows` of each head, of `heads` of each batch, of `batch` of each set; `sets` 0: one
// set, which is no dimension. Strides in elements, from one row to the next, one head, one batch, one set; the address
// and the strides (in bytes) are multiples of 16.
struct RowsExtent {
    const void* address;
    std::int32_t width, rows, heads, batch;
    std::int64_t row, head, batches;
    std::int32_t sets = 0;
    std::int64_t set = 0;
};

// Returns the same map for these rows, with coordinates: element, row, head, batch, set.
CUtensorMap tensor_map(const RowsExtent& extent, std::uint32_t box_height, bool half);

}  // namespace mkernel::hopper
