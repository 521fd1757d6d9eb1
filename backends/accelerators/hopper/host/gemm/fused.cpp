#include "backends/accelerators/hopper/host/gemm/fused.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/kernels/gemm/gemm_reduce.cuh"

namespace mkernel::hopper {

namespace {

constexpr int kTileRows = 128;
constexpr int kTileDepth = 64;
constexpr int kPieceRows = 32;  // of tile/block.cuh
constexpr std::size_t kAreaAlignment = 1024;

int tile_columns(Tiling tiling) {
    switch (tiling) {
        case Tiling::narrow:
        case Tiling::promoted:
            return 128;
        case Tiling::medium:
            return 192;
        default:
            return 256;
    }
}
int cluster_rows(Tiling tiling) {
    return tiling == Tiling::narrow ? kTileRows : 2 * kTileRows;
}
int divide_up(int value, int by) {
    return (value + by - 1) / by;
}

void check_flags(std::uint64_t wanted) {
    if (wanted > kFlags) {
        throw std::length_error("the call needs " + std::to_string(wanted) + " flags of " +
                                std::to_string(kFlags) + "; make it smaller");
    }
}

// Returns the maps of A's `rows` rows; each owner of some, or the last one, has `of_owner`.
Boxes boxes_of_rows(std::uint64_t address, int rows, int of_owner, const Product& product,
                    std::int64_t pitch = 0) {
    return boxes_of({.address = address,
                     .width = static_cast<std::uint64_t>(product.k),
                     .height = static_cast<std::uint64_t>(rows),
                     .pitch = static_cast<std::uint64_t>(pitch)},
                    kTileRows, of_owner, operands_of(product));
}

CUtensorMap map_of_layers(std::uint64_t address, int layers, int rows, int width, bool half,
                          int box_rows = kTileRows) {
    return tensor_map({address, static_cast<std::uint64_t>(width), static_cast<std::uint64_t>(rows),
                       static_cast<std::uint64_t>(layers)},
                      box_rows, half);
}

// Returns the tiles of one owner, counting every block of its clusters; `tile_bytes` returns the bytes of
// one.
std::uint64_t tiles_of(int rows, int n, Tiling tiling) {
    const int height = cluster_rows(tiling);
    return std::uint64_t{1} * divide_up(rows, height) * (height / kTileRows) *
           divide_up(n, tile_columns(tiling));
}
std::uint64_t tile_bytes(Tiling tiling) {
    return std::uint64_t{kTileRows} * tile_columns(tiling) * kElementBytes;
}

// Returns the number of scales of one rank's rows.
std::size_t scales_of(int rows, Scaling scaling) {
    return scaling == Scaling::single ? 1 : rows;
}

void check_one_node(const Workspace& workspace) {
    if (workspace.far() == 0) return;
    throw std::invalid_argument(
        "e4m3 operands on several nodes: " + std::to_string(workspace.far()) +
        " ranks are on other ones; expected all on this one");
}

std::size_t aligned(std::size_t bytes) {
    return (bytes + kAreaAlignment - 1) / kAreaAlignment * kAreaAlignment;
}

GemmVariant variant_of(const Product& product) {
    return {product.tiling, product.n_major};
}

}  // namespace

ElementType operands_of(const Product& product) {
    if (product.scaling != Scaling::none) return ElementType::e4m3;
    return product.half ? ElementType::float16 : ElementType::bfloat16;
}

OperandScales scales_of(const Product& product, std::uint64_t gathered_at) {
    return {.own = reinterpret_cast<const float*>(product.tensors.a_scale),
            .of_columns = reinterpret_cast<const float*>(product.tensors.b_scale),
            .single = product.scaling == Scaling::single,
            .gathered_at = gathered_at};
}

Boxes boxes_of_b(const Product& product) {
    const auto n = static_cast<std::uint64_t>(product.n);
    const auto k = static_cast<std::uint64_t>(product.k);
    TensorExtent extent{.address = product.tensors.b,
                        .width = product.n_major ? n : k,
                        .height = product.n_major ? k : n,
                        .pitch = static_cast<std::uint64_t>(product.tensors.b_pitch)};
    // Config::kBoxDepth, Config::kShareN
    const int depth = product.tiling == Tiling::medium ? kTileDepth / 2 : kTileDepth;
    const int blocks = cluster_rows(product.tiling) / kTileRows;
    const int share = tile_columns(product.tiling) / blocks;
    if (product.n_major) {
        const CUtensorMap whole = tensor_map(extent, depth, operands_of(product));
        return {whole, whole, 0};
    }
    return boxes_of(extent, share, product.n, operands_of(product));
}

std::size_t all_gather_gemm_bytes(int world, const AllGatherSchedule& schedule, int k,
                                  Scaling scaling) {
    check_flags(static_cast<std::uint64_t>(world) * schedule.flags());
    const std::size_t rows =
        static_cast<std::size_t>(world) * schedule.rows * k * operand_bytes(scaling);
    if (scaling == Scaling::none) return kDataOffset + rows;
    return kDataOffset + gathered_scales_at(rows) +
           world * scales_of(schedule.rows, scaling) * sizeof(float);
}

std::size_t gemm_reduce_bytes(int world, int local, int rows, int n, Tiling tiling, bool by_outbox,
                              bool gathers) {
    // The kernel's TileFlags numbers flags like this.
    check_flags((gathers ? 2 : 1) * tiles_of(rows, n, tiling) * (world - 1));
    if (local == 1) return kDataOffset;  // everything goes through the area for other nodes
    const std::size_t owned = static_cast<std::size_t>(rows) * n * kElementBytes;
    const std::size_t needed = owned * (world - 1) * (1 + (by_outbox ? 1 : 0) + (gathers ? 1 : 0));
    return kDataOffset + aligned(needed);
}

std::size_t gemm_reduce_area_bytes(int world, int local, int rows, int n, Tiling tiling,
                                   bool gathers, bool hierarchical) {
    const std::uint64_t peers = Rails{0, world / local, local, hierarchical}.peers();
    const std::uint64_t owners = gathers ? 3 * peers + 1 : 2 * peers;  // as AreaTiles of the kernel
    return owners * tiles_of(rows, n, tiling) * tile_bytes(tiling);
}

RowScales row_scales(const Product& product, int rows) {
    if (product.scaling == Scaling::none) return {};
    return {product.tensors.a_scale, scales_of(rows, product.scaling) * sizeof(float)};
}

void push_rows(const DeviceWorld& world, std::uint64_t rows, std::uint64_t row_bytes,
               const AllGatherSchedule& schedule, std::uint64_t stream, const RowScales& scales) {
    const Workspace workspace = workspace_of(world);
    if (workspace.world == 1) return;
    if (schedule.flags() > kEpochCopies) {
        throw std::length_error("copy engines take at most " + std::to_string(kEpochCopies) +
                                " parts of a rank's rows, not " + std::to_string(schedule.flags()));
    }
    const auto copied = [](cudaError_t status, std::uint64_t nbytes, int peer) {
        cuda::check(status, [&] {
            return "copying " + std::to_string(nbytes) + " bytes to rank " + std::to_string(peer);
        });
    };
    // Copies `count` rows from `first` on, `width` bytes of each from `at` on.
    const auto copy = [&](int peer, int first, int count, std::uint64_t at, std::uint64_t width) {
        const std::uint64_t own = first * row_bytes + at;
        const std::uint64_t before =
            static_cast<std::uint64_t>(workspace.rank) * schedule.rows * row_bytes;
        char* const to = workspace.data(peer) + before + own;
        const char* const from = reinterpret_cast<const char*>(rows) + own;
        const auto status =
            width == row_bytes
                ? cudaMemcpyAsync(to, from, count * width, cudaMemcpyDeviceToDevice,
                                  cuda::stream_at(stream))
                : cudaMemcpy2DAsync(to, row_bytes, from, row_bytes, width, count,
                                    cudaMemcpyDeviceToDevice, cuda::stream_at(stream));
        copied(status, count * width, peer);
    };
    const auto copy_scales = [&](int peer) {
        if (scales.bytes == 0) return;
        const std::uint64_t at = gathered_scales_at(workspace.world * schedule.rows * row_bytes) +
                                 workspace.rank * scales.bytes;
        copied(cudaMemcpyAsync(workspace.data(peer) + at,
                               reinterpret_cast<const void*>(scales.address), scales.bytes,
                               cudaMemcpyDeviceToDevice, cuda::stream_at(stream)),
               scales.bytes, peer);
    };
    const auto raise = [&](int peer, int first, int count) {
        transport::SetWord* const flags =
            workspace.flags(peer) + workspace.rank * schedule.flags() + first;
        const std::size_t nbytes = count * sizeof(transport::SetWord);
        copied(cudaMemcpyAsync(flags, workspace.control().epochs, nbytes, cudaMemcpyDeviceToDevice,
                               cuda::stream_at(stream)),
               nbytes, peer);
    };
    for (int step = 1; step < workspace.world - 1; ++step) {
        const int peer = (workspace.rank + workspace.world - step) % workspace.world;
        if (!workspace.near(peer)) continue;
        copy_scales(peer);
        copy(peer, 0, schedule.rows, 0, row_bytes);
        raise(peer, 0, schedule.flags());
    }
    const int last = (workspace.rank + 1) % workspace.world;
    if (!workspace.near(last)) return;
    copy_scales(last);
    const std::uint64_t each =
        slice_columns(static_cast<int>(row_bytes / kElementBytes), schedule.slices) * kElementBytes;
    for (int first = 0, flag = 0; first < schedule.rows; first += schedule.chunk_rows) {
        const int count = std::min(schedule.chunk_rows, schedule.rows - first);
        for (int slice = 0; slice < schedule.slices; ++slice, ++flag) {
            const std::uint64_t at = slice * each;
            if (at >= row_bytes) continue;  // nobody waits for it
            copy(last, first, count, at, std::min(each, row_bytes - at));
            raise(last, flag, 1);
        }
    }
}

namespace {

AllGatherGemmArgs gather_args(const DeviceWorld& world, const Product& product,
                              const AllGatherSchedule& schedule) {
    AllGatherGemmArgs args{};
    args.workspace = workspace_of(world);
    const int ranks = args.workspace.world;
    const GemmTensors& tensors = product.tensors;
    if (ranks > 1 && tensors.a_pitch != 0 && tensors.a_pitch != product.k) {
        throw std::invalid_argument("a_pitch = " + std::to_string(tensors.a_pitch) +
                                    "; expected packed rows: they travel to " +
                                    std::to_string(ranks - 1) + " other ranks");
    }
    const int step = kTileDepth * static_cast<int>(kElementBytes) / operand_bytes(product.scaling);
    const int parts = schedule.segments << schedule.levels;
    if (parts > 1 && (ranks > 1 || product.k % (parts * step) != 0)) {
        throw std::invalid_argument(
            std::to_string(parts) + " segments of k = " + std::to_string(product.k) + " on " +
            std::to_string(ranks) + " ranks; expected one rank, and a multiple of " +
            std::to_string(step) + " in each");
    }
    args.own = boxes_of_rows(tensors.a, schedule.rows, schedule.rows, product, tensors.a_pitch);
    args.gathered = args.own;
    if (ranks > 1) {
        args.gathered =
            boxes_of_rows(reinterpret_cast<std::uint64_t>(args.workspace.data(world.rank)),
                          ranks * schedule.rows, schedule.rows, product);
    }
    args.b = boxes_of_b(product);
    args.out = map_of_layers(tensors.out, ranks * schedule.segments, schedule.rows, product.n,
                             product.half);
    args.bias = reinterpret_cast<const void*>(tensors.bias);
    if (product.scaling != Scaling::none) {
        check_one_node(args.workspace);
        const std::uint64_t rows = std::uint64_t{1} * ranks * schedule.rows;
        args.scales = scales_of(product, gathered_scales_at(rows * product.k));
    }
    args.limits = limits_of(world);
    args.raster = {divide_up(schedule.rows, cluster_rows(product.tiling)),
                   divide_up(product.n, tile_columns(product.tiling)), product.band};
    args.rows = schedule.rows;
    args.n = product.n;
    args.k = product.k;
    args.chunk_rows = schedule.chunk_rows;
    args.chunks = schedule.count();
    args.slices = schedule.slices;
    args.segments = schedule.segments;
    args.levels = schedule.levels;
    args.rows_to_push = reinterpret_cast<const char*>(tensors.a);
    args.push_blocks = schedule.push_blocks;
    args.rails = rails_of(args.workspace, schedule.hierarchical);
    return args;
}

void launch(const AllGatherGemmArgs& args, const Product& product, std::uint64_t stream) {
    auto launch = product.half ? &launch_all_gather_gemm<__half, __half>
                               : &launch_all_gather_gemm<__nv_bfloat16, __nv_bfloat16>;
    if (product.scaling != Scaling::none) {
        launch = product.half ? &launch_all_gather_gemm<__half, __nv_fp8_e4m3>
                              : &launch_all_gather_gemm<__nv_bfloat16, __nv_fp8_e4m3>;
    }
    cuda::check(launch(args, variant_of(product), product.blocks, cuda::stream_at(stream)),
                "launching all_gather_gemm");
}

}  // namespace

void send_rows(const DeviceWorld& world, const Product& product, const AllGatherSchedule& schedule,
               std::uint64_t stream) {
    AllGatherGemmArgs args = gather_args(world, product, schedule);
    args.raster = {0, 0, 1};
    launch(args, product, stream);
}

void all_gather_gemm(const DeviceWorld& world, const Product& product,
                     const AllGatherSchedule& schedule, bool wait, std::uint64_t stream) {
    AllGatherGemmArgs args = gather_args(world, product, schedule);
    if (!wait) args.chunks = args.push_blocks = 0;
    launch(args, product, stream);
}

void gemm_reduce(const DeviceWorld& world, const Product& product, const ReduceSchedule& schedule,
                 std::uint64_t stream) {
    GemmReduceArgs args{};
    args.workspace = workspace_of(world);
    const int ranks = args.workspace.world;
    const GemmTensors& tensors = product.tensors;
    const int of_owner = schedule.rows % kTileRows == 0 ? schedule.m : schedule.rows;
    args.a = boxes_of_rows(tensors.a, schedule.m, of_owner, product, tensors.a_pitch);
    args.b = boxes_of_b(product);
    const auto layers = [&](std::uint64_t address, int count, int rows, int box_rows) {
        return map_of_layers(address, count, rows, product.n, product.half, box_rows);
    };
    const std::uint64_t area =
        static_cast<std::uint64_t>(ranks - 1) * schedule.rows * product.n * kElementBytes;
    const int out_rows = schedule.everywhere ? schedule.m : schedule.rows;
    args.symmetric = !schedule.outs.empty();
    for (int rank = 0; rank < ranks && args.workspace.local > 1; ++rank) {
        if (!args.workspace.near(rank)) continue;
        const auto inbox = reinterpret_cast<std::uint64_t>(args.workspace.data(rank));
        const std::uint64_t outbox = inbox + area;
        const std::uint64_t gathered = outbox + (schedule.by_outbox ? area : 0);
        args.inboxes[rank] = layers(inbox, ranks - 1, schedule.rows, kPieceRows);
        if (args.symmetric) {
            args.everyone[rank] = layers(schedule.outs.at(rank), 1, out_rows, kPieceRows);
        } else if (schedule.everywhere) {
            args.everyone[rank] = layers(gathered, ranks - 1, schedule.rows, kPieceRows);
        }
        if (rank != world.rank) continue;
        args.inbox = layers(inbox, ranks - 1, schedule.rows, kTileRows);
        if (!schedule.by_outbox) continue;
        args.outbox = layers(outbox, ranks - 1, schedule.rows, kTileRows);
        args.outbox_pieces = layers(outbox, ranks - 1, schedule.rows, kPieceRows);
    }
    if (args.workspace.far() > 0 && !schedule.alone) {
        const Network& network = args.workspace.network;
        const int local = args.workspace.local;
        if (!network.staged) {
            args.area_offset =
                gemm_reduce_bytes(ranks, local, schedule.rows, product.n, product.tiling,
                                  schedule.by_outbox, schedule.everywhere) -
                kDataOffset;
        }
        const auto address = reinterpret_cast<std::uint64_t>(network.area) + args.area_offset;
        const std::uint64_t tiles =
            gemm_reduce_area_bytes(ranks, local, schedule.rows, product.n, product.tiling,
                                   schedule.everywhere, schedule.hierarchical) /
            tile_bytes(product.tiling);
        const int width = tile_columns(product.tiling);
        args.area = map_of_layers(address, static_cast<int>(tiles), kTileRows, width, product.half);
        args.area_pieces = map_of_layers(address, static_cast<int>(tiles), kTileRows, width,
                                         product.half, kPieceRows);
        args.network_blocks = schedule.network_blocks;
    }
    args.is_given = schedule.given != 0;
    if (args.is_given) args.given = layers(schedule.given, 1, schedule.m, kTileRows);
    args.by_outbox = schedule.by_outbox;
    args.rails = rails_of(args.workspace, schedule.hierarchical);
    args.out = layers(tensors.out, 1, out_rows, kTileRows);
    args.out_pieces = layers(tensors.out, 1, out_rows, kPieceRows);
    args.everywhere = schedule.everywhere;
    args.landings = schedule.landings;
    args.landings.told = schedule.landings.told && schedule.everywhere && !args.symmetric &&
                         args.workspace.far() == 0 && !schedule.alone;
    args.bias = reinterpret_cast<const void*>(tensors.bias);
    args.limits = limits_of(world);
    args.raster = {divide_up(schedule.rows, cluster_rows(product.tiling)),
                   divide_up(product.n, tile_columns(product.tiling)), product.band};
    // Between nodes each owner has as many tiles as any, since arrivals are counted.
    args.cluster_rows = schedule.everywhere && args.workspace.far() == 0
                            ? divide_up(schedule.m, cluster_rows(product.tiling))
                            : ranks * args.raster.cluster_rows;
    args.panel_rows = std::min(schedule.panel_rows, args.raster.cluster_rows);
    args.panel_columns = std::min(schedule.panel_columns, args.raster.columns);
    args.pace = schedule.pace;
    args.m = schedule.m;
    args.rows = schedule.rows;
    args.n = product.n;
    args.k = product.k;
    args.alone = schedule.alone;
    auto launch = product.half ? &launch_gemm_reduce<__half, __half>
                               : &launch_gemm_reduce<__nv_bfloat16, __nv_bfloat16>;
    if (product.scaling != Scaling::none) {
        check_one_node(args.workspace);
        args.scales = scales_of(product);
        launch = product.half ? &launch_gemm_reduce<__half, __nv_fp8_e4m3>
                              : &launch_gemm_reduce<__nv_bfloat16, __nv_fp8_e4m3>;
    }
    cuda::check(launch(args, variant_of(product), product.blocks, cuda::stream_at(stream)),
                "launching gemm_reduce");
}

}  // namespace mkernel::hopper
