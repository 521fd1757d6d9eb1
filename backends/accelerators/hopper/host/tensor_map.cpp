#include "backends/accelerators/hopper/host/tensor_map.hpp"

#include <string>

#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::hopper {

namespace {
constexpr std::uint32_t kBoxBytes = 128;

CUtensorMapDataType data_type(ElementType type) {
    switch (type) {
        case ElementType::bfloat16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case ElementType::float16:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case ElementType::e4m3:
            break;
    }
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}
}  // namespace

CUtensorMap tensor_map(const TensorExtent& extent, std::uint32_t box_height, ElementType type) {
    const cuuint32_t rank = extent.depth == 0 ? 2 : 3;
    const cuuint64_t sizes[3] = {extent.width, extent.height, extent.depth};
    const cuuint64_t pitch = (extent.pitch == 0 ? extent.width : extent.pitch) * bytes_of(type);
    const cuuint64_t strides[2] = {pitch, pitch * extent.height};
    const cuuint32_t box[3] = {kBoxBytes / static_cast<cuuint32_t>(bytes_of(type)), box_height, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMap map{};
    cuda::check(cuda::driver().tensor_map_encode_tiled(
                    &map, data_type(type), rank, reinterpret_cast<void*>(extent.address), sizes,
                    strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                [&] {
                    return "cuTensorMapEncodeTiled([" + std::to_string(extent.depth) + ", " +
                           std::to_string(extent.height) + ", " + std::to_string(extent.width) +
                           "], a row every " + std::to_string(pitch) + " bytes, at " +
                           std::to_string(extent.address) + ")";
                });
    return map;
}

Boxes boxes_of(const TensorExtent& extent, int box_height, int rows, ElementType type) {
    const int rest = rows % box_height;
    const CUtensorMap whole = tensor_map(extent, box_height, type);
    return {whole, rest == 0 ? whole : tensor_map(extent, rest, type), rest};
}

CUtensorMap tensor_map(const RowsExtent& extent, std::uint32_t box_height, bool half) {
    const auto size = [](std::int64_t of) { return static_cast<cuuint64_t>(of); };
    const cuuint32_t rank = extent.sets == 0 ? 4 : 5;
    const cuuint64_t sizes[5] = {size(extent.width), size(extent.rows), size(extent.heads),
                                 size(extent.batch), size(extent.sets)};
    const cuuint64_t strides[4] = {
        size(extent.row) * kElementBytes, size(extent.head) * kElementBytes,
        size(extent.batches) * kElementBytes, size(extent.set) * kElementBytes};
    const cuuint32_t box[5] = {kBoxBytes / kElementBytes, box_height, 1, 1, 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map{};
    const ElementType type = half ? ElementType::float16 : ElementType::bfloat16;
    cuda::check(
        cuda::driver().tensor_map_encode_tiled(
            &map, data_type(type), rank, const_cast<void*>(extent.address), sizes, strides, box,
            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        [&] {
            return "cuTensorMapEncodeTiled([" + std::to_string(extent.sets) + ", " +
                   std::to_string(extent.batch) + ", " + std::to_string(extent.heads) + ", " +
                   std::to_string(extent.rows) + ", " + std::to_string(extent.width) + "], every " +
                   std::to_string(extent.set) + ", " + std::to_string(extent.batches) + ", " +
                   std::to_string(extent.head) + ", " + std::to_string(extent.row) + " elements)";
        });
    return map;
}

}  // namespace mkernel::hopper
