// The kernel of gemm_reduce.cuh.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/kernels/gemm_reduce.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"
#include "backends/accelerators/hopper/tile/tile_forwarder.cuh"

namespace mkernel::hopper {

struct OwnedTile {
    int owner;
    int row;     // within the owner's rows
    int column;  // element
    int number;  // among the owner's tiles
    bool last;   // of this block
};

// Calls body(OwnedTile) for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const GemmReduceArgs& args, Body&& body) {
    const int world = args.workspace.world;
    OwnerOrder order(args.raster, args.panel_rows, args.panel_columns, world);
    const int tiles = world * args.raster.tiles();
    const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = static_cast<int>(blockIdx.x) / C::kCluster; index < tiles; index += clusters) {
        int step = 0;
        int cluster_row = 0;
        int column = 0;
        order.at(index, step, cluster_row, column);
        const int row = cluster_row * C::kCluster + block;
        body(OwnedTile{(args.workspace.rank + step) % world, row * kTileM, column * C::kTileN,
                       row * args.raster.columns + column, index + clusters >= tiles});
    }
}

// Flags of tiles: see gemm_reduce.cuh.
struct TileFlags {
    const Workspace& workspace;
    int tiles;  // of an owner

    // The place of `other` among the ranks but `at`, counted from at + 1 on.
    __device__ int slot(int other, int at) const {
        return (other - at - 1 + workspace.world) % workspace.world;
    }
    // What `source` sets at `at`; `second`: when the sum, not the part, is there.
    __device__ int number(int source, int at, int tile, bool second) const {
        return ((second ? workspace.world - 1 : 0) + slot(source, at)) * tiles + tile;
    }
    __device__ bool wait(const transport::DeviceWaiter& waiter, std::uint64_t epoch, int source,
                         int tile, bool second) const {
        const int flag = number(source, workspace.rank, tile, second);
        const bool come =
            waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                         {static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(source),
                          static_cast<std::uint32_t>(tile)});
        ptx::fence_async_proxy();
        return come;
    }
    __device__ void set(std::uint64_t epoch, int at, int tile, bool second) const {
        workspace.flags(at)[number(workspace.rank, at, tile, second)].set(epoch);
    }
};

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    gemm_reduce(const __grid_constant__ GemmReduceArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const std::uint64_t epoch = world > 1 ? args.workspace.control().state.epoch : 0;
    const int steps = (args.k + kTileK - 1) / kTileK;
    const int sources = args.alone ? 0 : world - 1;
    const TileFlags flags{args.workspace, args.raster.tiles() * C::kCluster};

    switch (take_role()) {
        case Role::loader: {
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                Operands<C, kNMajorB>{&args.b, tile.column}.load(
                    shared, cursor, &args.a, tile.owner * args.rows + tile.row, 0, steps);
                if (tile.owner != rank) return;
                for (int slot = 0; slot < sources; ++slot) {
                    flags.wait(waiter, epoch, (rank + 1 + slot) % world, tile.number, false);
                    load_tile(shared, cursor, &args.inbox, tile.column, tile.row, slot);
                }
            });
            break;
        }
        case Role::storer: {
            Storer<C> storer(shared);
            const bool pushes = args.everywhere && sources > 0;
            if (pushes && args.symmetric && blockIdx.x == 0) announce_start(args.workspace, epoch);
            bool may_push = !args.symmetric;
            std::uint32_t stored = 0;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                const bool own = tile.owner == rank;
                const int out_row = (args.everywhere ? rank * args.rows : 0) + tile.row;
                if (own && pushes) {
                    if (!may_push) may_push = wait_for_starts(args.workspace, waiter, epoch);
                    const int pace = tile.last ? 0 : args.pace;
                    storer.put(pace, [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.out_pieces, piece, tile.column + x, out_row + y, 0);
                        for (int step = 1; may_push && step < world; ++step) {
                            const int peer = (rank + step) % world;
                            ptx::store_box(&args.everyone[peer], piece, tile.column + x,
                                           (args.symmetric ? out_row : tile.row) + y,
                                           args.symmetric ? 0 : flags.slot(rank, peer));
                        }
                    });
                    if (args.symmetric) return;
                    ptx::fence_async_proxy();
                    for (int step = 1; step < world; ++step) {
                        flags.set(epoch, (rank + step) % world, tile.number, true);
                    }
                } else if (own) {
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.out, slice, tile.column + number * kSliceN, out_row,
                                       0);
                    });
                } else if (sources == 0) {
                    storer.tile([](const void*, int) {});
                } else if (args.by_outbox) {
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.outbox, slice, tile.column + number * kSliceN,
                                       tile.row, flags.slot(tile.owner, rank));
                    });
                    tell_stored(shared, ++stored);
                } else {
                    const int there = flags.slot(rank, tile.owner);
                    storer.put(args.pace, [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.inboxes[tile.owner], piece, tile.column + x,
                                       tile.row + y, there);
                    });
                    ptx::fence_async_proxy();
                    flags.set(epoch, tile.owner, tile.number, false);
                }
            });
            break;
        }
        case Role::sender: {
            if (sources == 0 || !args.by_outbox) break;
            TileForwarder<C> sender(shared, 0, C::kPieceBuffers / 2, args.pace);
            std::uint32_t stored = 0;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                if (tile.owner == rank) return;
                wait_stored(shared, ++stored);
                const int layer = flags.slot(tile.owner, rank);
                const int there = flags.slot(rank, tile.owner);
                sender.tile(
                    [&](void* piece, ptx::Mbarrier* arrived, int x, int y) {
                        ptx::load_box(piece, &args.outbox_pieces, arrived, tile.column + x,
                                      tile.row + y, layer);
                    },
                    [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.inboxes[tile.owner], piece, tile.column + x,
                                       tile.row + y, there);
                    });
                sender.complete();
                flags.set(epoch, tile.owner, tile.number, false);
            });
            break;
        }
        case Role::receiver: {
            if (sources == 0 || !args.everywhere || args.symmetric) break;
            const int first =
                args.by_outbox ? C::kPieceBuffers / 2 : 0;  // those before: the sender's
            TileForwarder<C> receiver(shared, first, C::kPieceBuffers - first, 0);
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                if (tile.owner == rank) return;
                if (!flags.wait(waiter, epoch, tile.owner, tile.number, true)) return;
                const int layer = flags.slot(tile.owner, rank);
                receiver.tile(
                    [&](void* piece, ptx::Mbarrier* arrived, int x, int y) {
                        ptx::load_box(piece, &args.everyone[rank], arrived, tile.column + x,
                                      tile.row + y, layer);
                    },
                    [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.out_pieces, piece, tile.column + x,
                                       tile.owner * args.rows + tile.row + y, 0);
                    });
            });
            receiver.complete();
            break;
        }
        case Role::multiplier: {
            Multiplier<C, Element, kNMajorB> multiplier(shared);
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                multiplier.multiply(steps);
                if (tile.owner == rank) {
                    for (int slot = 0; slot < sources; ++slot) multiplier.add_tile();
                    multiplier.add_bias(args.bias, tile.column, args.n);
                }
                multiplier.write();
            });
            break;
        }
        case Role::idle:
            break;
    }
    close_block<C>();
    if (threadIdx.x == 0) finish_call(args.workspace, waiter, epoch);
}

template <class Element>
cudaError_t launch_gemm_reduce(const GemmReduceArgs& args, GemmVariant variant, int blocks,
                               cudaStream_t stream) {
    const int tiles = args.raster.tiles() * args.workspace.world;
    const auto start = [&]<class C>() {
        return launch_blocks<C>(
            variant.n_major_b ? gemm_reduce<C, Element, true> : gemm_reduce<C, Element, false>,
            args, tiles, blocks, stream);
    };
    switch (variant.tiling) {
        case Tiling::wide:
        case Tiling::deep:
            return start.template operator()<WideCarry>();
        case Tiling::narrow:
            return start.template operator()<NarrowCarry>();
    }
    return cudaErrorInvalidValue;
}

}  // namespace mkernel::hopper
