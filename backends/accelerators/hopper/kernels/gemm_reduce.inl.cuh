// The kernel of gemm_reduce.cuh.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/kernels/gemm_reduce.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"

namespace mkernel::hopper {

struct OwnedTile {
    int owner;
    int row;     // within the owner's rows
    int column;  // element
    int number;  // among the owner's tiles
};

// Calls body(OwnedTile) for each of this block's tiles, in order: the others' band 0; then, a band
// at a time, the others' next and the own one before it; the own last one.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const GemmReduceArgs& args, Body&& body) {
    const int world = args.region.world;
    const int tiles = args.raster.tiles();
    const int ahead = (world - 1) * tiles;
    const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = static_cast<int>(blockIdx.x) / C::kCluster; index < args.bands * world * tiles;
         index += clusters) {
        int band = 0;
        int step = 0;  // owner, counted from this rank
        int within = index;
        if (index >= ahead) {
            const int turn = (index - ahead) / (world * tiles);
            within = index - ahead - turn * world * tiles;
            const bool own = turn == args.bands - 1 || within >= ahead;
            band = own ? turn : turn + 1;
            step = own ? 0 : 1 + within / tiles;
            if (own && turn != args.bands - 1) within -= ahead;
        } else {
            step = 1 + index / tiles;
        }
        if (step > 0) within -= (step - 1) * tiles;
        int cluster_row = 0;
        int column = 0;
        args.raster.at(within, cluster_row, column);
        const int row = (band * args.raster.cluster_rows + cluster_row) * C::kCluster + block;
        body(OwnedTile{(args.region.rank + step) % world, row * kTileM, column * C::kTileN,
                       row * args.raster.columns + column});
    }
}

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    gemm_reduce(const __grid_constant__ GemmReduceArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const Waiter waiter(args.region, args.patience, runtime::Waiter::compute_kernel);
    const int rank = args.region.rank;
    const int world = args.region.world;
    const std::uint64_t epoch = world > 1 ? args.region.control().epoch : 0;
    const int steps = (args.k + kTileK - 1) / kTileK;
    const int sources = args.alone ? 0 : world - 1;
    const int tiles_of_owner = args.bands * args.raster.tiles() * C::kCluster;

    switch (take_role()) {
        case Role::loader: {
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                Operands<C, kNMajorB>{&args.b, tile.column}.load(
                    shared, cursor, &args.a, tile.owner * args.rows + tile.row, steps);
                if (tile.owner != rank) return;
                for (int slot = 0; slot < sources; ++slot) {
                    const int flag = slot * tiles_of_owner + tile.number;
                    waiter.until(args.region.flags(rank) + flag, epoch,
                                 {static_cast<std::uint32_t>(flag),
                                  static_cast<std::uint32_t>((rank + 1 + slot) % world),
                                  static_cast<std::uint32_t>(tile.number)});
                    ptx::fence_async_proxy();
                    load_tile(shared, cursor, &args.slots[rank], tile.column, tile.row, slot);
                }
            });
            break;
        }
        case Role::storer: {
            if (blockIdx.x == 0 && args.out_count > 1) announce_start(args.region, epoch);
            Storer<C> storer(shared);
            bool may_push = args.out_count == 1;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                if (tile.owner == rank) {
                    if (!may_push) may_push = wait_for_starts(args.region, waiter, epoch);
                    const int outs = may_push ? args.out_count : 1;
                    storer.tile([&](const void* slice, int number) {
                        for (int out = 0; out < outs; ++out) {
                            ptx::store_box(&args.outs[out], slice, tile.column + number * kSliceN,
                                           args.out_row + tile.row, 0);
                        }
                    });
                } else if (args.alone) {
                    storer.tile([](const void*, int) {});
                } else {
                    const int slot = (rank - tile.owner - 1 + world) % world;
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.slots[tile.owner], slice,
                                       tile.column + number * kSliceN, tile.row, slot);
                    });
                    ptx::fence_async_proxy();
                    ptx::store_release(
                        args.region.flags(tile.owner) + slot * tiles_of_owner + tile.number, epoch);
                }
            });
            break;
        }
        case Role::multiplier: {
            Multiplier<C, Element, kNMajorB> multiplier(shared);
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                multiplier.multiply(steps);
                if (tile.owner == rank) {
                    for (int slot = 0; slot < sources; ++slot) multiplier.add_tile();
                    if (args.bias != nullptr) {
                        multiplier.add_bias(static_cast<const Element*>(args.bias), tile.column,
                                            args.n);
                    }
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
cudaError_t launch_gemm_reduce(const GemmReduceArgs& args, GemmVariant variant, int blocks,
                               cudaStream_t stream) {
    const int tiles = args.raster.tiles() * args.bands * args.region.world;
    const auto start = [&]<class C>() {
        return launch_blocks<C>(
            variant.n_major_b ? gemm_reduce<C, Element, true> : gemm_reduce<C, Element, false>,
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
