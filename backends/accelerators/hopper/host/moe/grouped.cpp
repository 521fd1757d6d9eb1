#include "backends/accelerators/hopper/host/moe/grouped.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"
#include "backends/accelerators/hopper/kernels/moe/grouped.cuh"

namespace mkernel::hopper::moe {

namespace {

constexpr std::uint32_t kStageRows = 64;    // of a K-step
constexpr std::uint32_t kShareRows = 128;   // columns of the weight in one box
constexpr std::int32_t kScaledBlock = 128;  // elements of a row that have one scale

}  // namespace

void grouped(const DeviceWorld& world, const GroupedProduct& product, std::uint64_t stream) {
    GroupedArgs args{};
    args.workspace = workspace_of(world);
    args.limits = limits_of(world);
    args.tables = tables_of(product.sizes, product.routing);
    args.crossing = crossing_of(product.sizes, product.row_bytes, product.pieces);
    args.a = reinterpret_cast<const char*>(product.a);
    args.out = reinterpret_cast<char*>(product.out);
    args.row_bytes = static_cast<std::int64_t>(product.row_bytes);
    args.height = product.height;
    args.waits = product.waits;
    const auto n = static_cast<std::uint64_t>(product.n);
    const auto k = static_cast<std::uint64_t>(product.k);
    const std::uint64_t columns = product.gated ? 2 * n : n;
    const bool scaled = product.b_scales != 0;
    const bool quantised = product.out_scales != 0;
    const ElementType narrow = product.half ? ElementType::float16 : ElementType::bfloat16;
    const ElementType in = scaled ? ElementType::e4m3 : narrow;
    args.b = tensor_map({.address = product.b,
                         .width = product.n_major ? columns : k,
                         .height = product.n_major ? k : columns,
                         .depth = static_cast<std::uint64_t>(product.sizes.experts)},
                        product.n_major ? kStageRows : kShareRows, in);
    const bool gathers = product.tokens && product.permuted == 0;
    // Without rows there are no tiles, and nothing reads or writes by these maps.
    const auto rows_at = [&](std::uint64_t address, std::uint64_t width, std::uint64_t depth,
                             std::uint64_t pitch, ElementType type) {
        const bool any = product.rows > 0;
        return tensor_map({.address = any ? address : product.b,
                           .width = width,
                           .height = any ? static_cast<std::uint64_t>(product.rows) : 1,
                           .depth = depth,
                           .pitch = pitch},
                          kBoxRows, type);
    };
    const std::uint64_t rows = product.tokens ? product.permuted : product.a;
    if (!gathers) args.rows = rows_at(rows, k, 0, product.row_bytes / bytes_of(in), in);
    if (!product.home && !product.wide) {
        args.results = rows_at(product.out, n, 1, 0, quantised ? ElementType::e4m3 : narrow);
    }
    args.permuted = reinterpret_cast<char*>(product.permuted);
    args.row_scales =
        reinterpret_cast<const float*>(product.a_scales == 0 ? rows + k : product.a_scales);
    args.scales_a_row = product.a_scales == 0 ? args.row_bytes / std::int64_t{sizeof(float)}
                                              : product.k / kScaledBlock;
    args.b_scales = reinterpret_cast<const float*>(product.b_scales);
    args.out_scales = reinterpret_cast<float*>(product.out_scales);
    args.n = product.n;
    args.k = product.k;
    args.home = product.home;
    args.keeps = !product.waits;
    args.ends = product.ends;
    const GroupedVariant variant{
        .n_major_b = product.n_major,
        .gathers = gathers,
        .gated = product.gated,
        .wide = product.wide,
        .deep = product.deep,
        .quantised = quantised,
    };
    const bool half = product.half && !(scaled && (product.wide || quantised));
    const auto launch =
        scaled ? (half ? &launch_grouped_e4m3<__half> : &launch_grouped_e4m3<__nv_bfloat16>)
               : (half ? &launch_grouped<__half> : &launch_grouped<__nv_bfloat16>);
    cuda::check(launch(args, variant, product.blocks, cuda::stream_at(stream)),
                "launching the grouped product");
}

void load_grouped() {
    load_grouped<__half>();
    load_grouped<__nv_bfloat16>();
}

}  // namespace mkernel::hopper::moe
