#include "backends/accelerators/hopper/host/gemm/few_rows.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"
#include "backends/accelerators/hopper/kernels/gemm/mailed_tiles.cuh"

namespace mkernel::hopper {

namespace {

// Returns the rows of `out` on one of `world` ranks.
int rows_of(int world, const FewRowsSchedule& schedule) {
    return schedule.m / (schedule.exchange == FewRowsExchange::reduce_scatter ? world : 1);
}

// Returns the bytes that one rank mails to another one.
std::uint64_t slot_bytes(int world, int n, const FewRowsSchedule& schedule) {
    const std::uint64_t elements = std::uint64_t{1} * rows_of(world, schedule) * n;
    return (elements * (schedule.unrounded ? sizeof(float) : kElementBytes) + 127) / 128 * 128;
}

void check_tiled(const Product& product, const FewRowsSchedule& schedule) {
    if (schedule.exchange != FewRowsExchange::all_reduce) {
        throw std::invalid_argument("tiles by mail that are scattered");
    }
    if (product.scaling != Scaling::none) {
        throw std::invalid_argument("tiles by mail of e4m3 operands");
    }
}

auto* launch_of(const Product& product) {
    if (product.scaling != Scaling::none) {
        return product.half ? &launch_few_rows<__half, __nv_fp8_e4m3>
                            : &launch_few_rows<__nv_bfloat16, __nv_fp8_e4m3>;
    }
    return product.half ? &launch_few_rows<__half, __half>
                        : &launch_few_rows<__nv_bfloat16, __nv_bfloat16>;
}

}  // namespace

int few_rows_height(int m) {
    for (const int height : {16, 32, 64}) {
        if (m <= height) return height;
    }
    return kMostFewRows;
}

void check_few_rows(int world, int n, const FewRowsSchedule& schedule) {
    const int slots = schedule.tiled ? world - 1 : world;
    const std::uint64_t needed = slots * slot_bytes(world, n, schedule);
    if (world > 1 && needed > kMailBytes) {
        throw std::length_error("the ranks' sums are " + std::to_string(needed) +
                                " bytes; a call of few rows may have " +
                                std::to_string(kMailBytes));
    }
}

void few_rows(const DeviceWorld& world, const Product& product, const FewRowsSchedule& schedule,
              const Prefetch& prefetch, std::uint64_t stream) {
    const auto ranks = static_cast<int>(world.workspaces.size());
    check_few_rows(ranks, product.n, schedule);
    if (schedule.tiled) check_tiled(product, schedule);
    const GemmTensors& tensors = product.tensors;
    FewRowsArgs args{};
    args.workspace = workspace_of(world);
    args.limits = limits_of(world);
    args.a = boxes_of({.address = tensors.a,
                       .width = static_cast<std::uint64_t>(product.k),
                       .height = static_cast<std::uint64_t>(schedule.m),
                       .pitch = static_cast<std::uint64_t>(tensors.a_pitch)},
                      schedule.tiled ? kMailedRows : schedule.m, schedule.m, operands_of(product));
    args.b = boxes_of_b(product);
    args.bias = reinterpret_cast<const void*>(tensors.bias);
    if (product.scaling != Scaling::none) args.scales = scales_of(product);
    args.out = reinterpret_cast<void*>(tensors.out);
    args.slot = slot_bytes(ranks, product.n, schedule);
    args.m = schedule.m;
    args.n = product.n;
    args.k = product.k;
    args.rows = rows_of(ranks, schedule);
    args.exchange = schedule.exchange;
    args.unrounded = schedule.unrounded;
    args.prefetch = prefetch;
    const cudaStream_t on = cuda::stream_at(stream);
    if (schedule.tiled) {
        auto* const launch =
            product.half ? &launch_mailed_tiles<__half> : &launch_mailed_tiles<__nv_bfloat16>;
        cuda::check(launch(args, {product.tiling, product.n_major}, product.blocks, on),
                    "launching mailed_tiles");
        return;
    }
    cuda::check(launch_of(product)(args, product.n_major, schedule.splits, product.blocks, on),
                "launching few_rows");
}

FewRowsCalls::FewRowsCalls(int device, DeviceWorld world, Product product, FewRowsSchedule schedule)
    : device_(device), world_(std::move(world)), product_(product), schedule_(schedule) {}

void FewRowsCalls::start(const CallOnce& call, const Prefetch& prefetch) {
    const cuda::DeviceScope scope(device_);
    world_.call = call.number;
    world_.timeout_s = call.timeout_s;
    product_.tensors = call.tensors;
    few_rows(world_, product_, schedule_, prefetch, call.stream);
}

}  // namespace mkernel::hopper
