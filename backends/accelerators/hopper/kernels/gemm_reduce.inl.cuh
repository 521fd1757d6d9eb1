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

// The order of the tiles of all owners: the others' band 0; then, a band at a time, the others' next
// and the own one before it; the own last one.
class Sequence {
  public:
    __device__ Sequence(const Raster& raster, int band_columns, int world)
        : raster_(raster),
          band_columns_(band_columns),
          bands_((raster.columns + band_columns - 1) / band_columns),
          others_(world - 1) {}

    // `step`: the owner, counted from this rank; `cluster_row` and `column` of its tiles.
    __device__ void at(int index, int& step, int& cluster_row, int& column) const {
        int band = 0;
        int within = index;
        step = 1;  // and further, below
        if (within >= others_ * tiles(0)) {
            within -= others_ * tiles(0);
            const int full = tiles(0);
            const int turn = min(within / ((others_ + 1) * full), max(bands_ - 2, 0));
            within -= turn * (others_ + 1) * full;
            const int ahead = turn + 1 < bands_ ? others_ * tiles(turn + 1) : 0;
            if (within < ahead) {
                band = turn + 1;
            } else {
                step = 0;
                within -= ahead;
                band = turn;
                if (within >= full && bands_ > 1) {
                    within -= full;
                    band = bands_ - 1;
                }
            }
        }
        if (step > 0) {
            step += within / tiles(band);
            within %= tiles(band);
        }
        Raster part = raster_;
        part.columns = width(band);
        part.at(within, cluster_row, column);
        column += band * band_columns_;
    }

  private:
    __device__ int width(int band) const {
        return min(band_columns_, raster_.columns - band * band_columns_);
    }
    __device__ int tiles(int band) const { return raster_.cluster_rows * width(band); }

    Raster raster_;
    int band_columns_;
    int bands_;
    int others_;
};

// Calls body(OwnedTile) for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const GemmReduceArgs& args, Body&& body) {
    const int world = args.region.world;
    const Sequence sequence(args.raster, args.band_columns, world);
    const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = static_cast<int>(blockIdx.x) / C::kCluster;
         index < world * args.raster.tiles(); index += clusters) {
        int step = 0;
        int cluster_row = 0;
        int column = 0;
        sequence.at(index, step, cluster_row, column);
        const int row = cluster_row * C::kCluster + block;
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
    const int tiles_of_owner = args.raster.tiles() * C::kCluster;

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
                    load_tile(shared, cursor, &args.own_slots, tile.column, tile.row, slot);
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
                    if (args.out_count == 1 || !may_push) {
                        storer.tile([&](const void* slice, int number) {
                            ptx::store_box(&args.out, slice, tile.column + number * kSliceN,
                                           args.out_row + tile.row, 0);
                        });
                        return;
                    }
                    storer.trickle(args.pace, [&](const void* rows, int number, int first) {
                        const int column = tile.column + number * kSliceN;
                        const int row = args.out_row + tile.row + first;
                        for (int out = 0; out < args.out_count; ++out) {
                            ptx::store_box(&args.outs[out], rows, column, row, 0);
                        }
                    });
                } else if (args.alone) {
                    storer.tile([](const void*, int) {});
                } else {
                    const int slot = (rank - tile.owner - 1 + world) % world;
                    storer.trickle(args.pace, [&](const void* rows, int number, int first) {
                        ptx::store_box(&args.slots[tile.owner], rows,
                                       tile.column + number * kSliceN, tile.row + first, slot);
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
    const int tiles = args.raster.tiles() * args.region.world;
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
