// The kernel of all_gather_gemm.cuh; one object file a variant includes it.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/kernels/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"

namespace mkernel::hopper {

// Calls body(shard, row within it, column) for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const AllGatherGemmArgs& args, Body&& body) {
    const int per_shard = args.raster.tiles();
    const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = static_cast<int>(blockIdx.x) / C::kCluster;
         index < per_shard * args.region.world; index += clusters) {
        const int step = index / per_shard;
        int cluster_row = 0;
        int column = 0;
        args.raster.at(index - step * per_shard, cluster_row, column);
        body((args.region.rank + step) % args.region.world,
             (cluster_row * C::kCluster + block) * kTileM, column * C::kTileN);
    }
}

__device__ inline void wait_for_rows(const AllGatherGemmArgs& args, const Waiter& waiter,
                                     std::uint64_t epoch, int shard, int row) {
    if (args.chunks == 0 || row >= args.rows) return;
    const int last = min(row + kTileM, args.rows) - 1;
    for (int chunk = row / args.chunk_rows; chunk <= last / args.chunk_rows; ++chunk) {
        const int flag = shard * args.chunks + chunk;
        if (!waiter.until(args.region.flags(args.region.rank) + flag, epoch,
                          {static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(shard),
                           static_cast<std::uint32_t>(chunk)})) {
            break;
        }
    }
    ptx::fence_async_proxy();
}

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    all_gather_gemm(const __grid_constant__ AllGatherGemmArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const Waiter waiter(args.region, args.patience, runtime::Waiter::compute_kernel);
    const std::uint64_t epoch = args.region.world > 1 ? args.region.control().epoch : 0;
    const int steps = (args.k + kTileK - 1) / kTileK;

    switch (take_role()) {
        case Role::loader: {
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](int shard, int row, int column) {
                const bool own = shard == args.region.rank;
                if (!own) wait_for_rows(args, waiter, epoch, shard, row);
                Operands<C, kNMajorB>{&args.b, column}.load(
                    shared, cursor, own ? &args.own : &args.gathered,
                    own ? row : shard * args.rows + row, steps);
            });
            break;
        }
        case Role::storer: {
            Storer<C> storer(shared);
            for_each_tile<C>(args, [&](int shard, int row, int column) {
                storer.tile([&](const void* slice, int number) {
                    ptx::store_box(&args.out, slice, column + number * kSliceN, row, shard);
                });
            });
            break;
        }
        case Role::multiplier: {
            Multiplier<C, Element, kNMajorB> multiplier(shared);
            for_each_tile<C>(args, [&](int, int, int column) {
                multiplier.multiply(steps);
                if (args.bias != nullptr) {
                    multiplier.add_bias(static_cast<const Element*>(args.bias), column, args.n);
                }
                multiplier.write();
            });
            break;
        }
        case Role::idle:
            break;
    }
    close_block<C>();
    if (threadIdx.x == 0) finish_call(args.region, waiter, epoch);
}

template <class Element>
cudaError_t launch_all_gather_gemm(const AllGatherGemmArgs& args, GemmVariant variant, int blocks,
                                   cudaStream_t stream) {
    const int tiles = args.raster.tiles() * args.region.world;
    const auto start = [&]<class C>() {
        return launch_blocks<C>(variant.n_major_b ? all_gather_gemm<C, Element, true>
                                                  : all_gather_gemm<C, Element, false>,
                                args, tiles, blocks, stream);
    };
    switch (variant.tiling) {
        case Tiling::wide:
            return start.template operator()<Wide>();
        case Tiling::deep:
            return start.template operator()<Deep>();
        case Tiling::narrow:
            return start.template operator()<Narrow>();
    }
    return cudaErrorInvalidValue;
}

}  // namespace mkernel::hopper
