// The kernel of all_gather_gemm.cuh; one object file a variant includes it.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/kernels/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"
#include "backends/accelerators/hopper/transfer/bulk_copy.cuh"

namespace mkernel::hopper {

// Calls body(shard, row within it, column) for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const AllGatherGemmArgs& args, Body&& body) {
    const ArrivalOrder order(args.raster, args.columns_ahead, args.workspace.world);
    const int tiles = args.raster.tiles() * args.workspace.world;
    const int clusters = (static_cast<int>(gridDim.x) - args.push_blocks) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = (static_cast<int>(blockIdx.x) - args.push_blocks) / C::kCluster; index < tiles;
         index += clusters) {
        int step = 0;
        int cluster_row = 0;
        int column = 0;
        order.at(index, step, cluster_row, column);
        body((args.workspace.rank + step) % args.workspace.world,
             (cluster_row * C::kCluster + block) * kTileM, column * C::kTileN);
    }
}

__device__ inline void wait_for_rows(const AllGatherGemmArgs& args,
                                     const transport::DeviceWaiter& waiter, std::uint64_t epoch,
                                     int shard, int row, int slice) {
    if (args.chunks == 0 || row >= args.rows) return;
    const int last = min(row + kTileM, args.rows) - 1;
    for (int chunk = row / args.chunk_rows; chunk <= last / args.chunk_rows; ++chunk) {
        const int part = chunk * args.slices + slice;
        const int flag = shard * args.chunks * args.slices + part;
        if (!waiter.until(args.workspace.flags(args.workspace.rank)[flag], epoch,
                          {static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(shard),
                           static_cast<std::uint32_t>(part)})) {
            break;
        }
    }
    ptx::fence_async_proxy();
}

inline constexpr int kPushers = 2;  // threads of a pushing block: its loader and its storer

// What a pushing block does instead: each pusher has stages of its own, takes chunks in turn and
// publishes each by its flag.
template <class C>
__device__ __forceinline__ void push_chunks(const AllGatherGemmArgs& args, Shared<C>& shared,
                                            int pusher, std::uint64_t epoch) {
    constexpr int kRing = 4;
    constexpr std::uint32_t kPiece = 16 << 10;
    static_assert(kPushers * kRing * kPiece <= C::kStages * C::kStageBytes);
    transfer::BulkRing<kRing> ring(
        reinterpret_cast<char*>(shared.stages[0]) + pusher * kRing * kPiece,
        reinterpret_cast<ptx::Mbarrier*>(shared.slices[0]) + pusher * kRing, kPiece);
    ring.init();

    const std::uint64_t row_bytes = static_cast<std::uint64_t>(args.k) * kElementBytes;
    const Workspace& workspace = args.workspace;
    for (int task = static_cast<int>(blockIdx.x) * kPushers + pusher;
         task < (workspace.world - 1) * args.chunks; task += args.push_blocks * kPushers) {
        const int peer =
            (workspace.rank + workspace.world - 1 - task / args.chunks) % workspace.world;
        const int chunk = task % args.chunks;
        const int first = chunk * args.chunk_rows;
        const int count = min(args.chunk_rows, args.rows - first);
        char* to = workspace.data(peer) +
                   (static_cast<std::uint64_t>(workspace.rank) * args.rows + first) * row_bytes;
        ring.copy(to, args.rows_to_push + first * row_bytes, count * row_bytes, 0, 1);
        ring.complete();
        (workspace.flags(peer) + workspace.rank * args.chunks + chunk)->set(epoch);
    }
}

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    all_gather_gemm(const __grid_constant__ AllGatherGemmArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const std::uint64_t epoch = args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
    const int steps = (args.k + kTileK - 1) / kTileK;

    const bool pushes = static_cast<int>(blockIdx.x) < args.push_blocks;
    switch (take_role()) {
        case Role::loader: {
            if (pushes) {
                push_chunks(args, shared, 0, epoch);
                break;
            }
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](int shard, int row, int column) {
                const Operands<C, kNMajorB> operands{&args.b, column};
                if (shard == args.workspace.rank) {
                    operands.load(shared, cursor, &args.own, row, 0, steps);
                    return;
                }
                static_assert(kTileK == 64, "slice_columns counts such steps");
                const int each = slice_columns(args.k, args.slices) / kTileK;
                for (int slice = 0; slice * each < steps; ++slice) {
                    wait_for_rows(args, waiter, epoch, shard, row, slice);
                    operands.load(shared, cursor, &args.gathered, shard * args.rows + row,
                                  slice * each, min((slice + 1) * each, steps));
                }
            });
            break;
        }
        case Role::storer: {
            if (pushes) {
                push_chunks(args, shared, 1, epoch);
                break;
            }
            Storer<C> storer(shared);
            for_each_tile<C>(args, [&](int shard, int row, int column) {
                storer.tile([&](const void* slice, int number) {
                    ptx::store_box(&args.out, slice, column + number * kSliceN, row, shard);
                });
            });
            break;
        }
        case Role::multiplier: {
            if (pushes) break;
            Multiplier<C, Element, kNMajorB> multiplier(shared);
            for_each_tile<C>(args, [&](int, int, int column) {
                multiplier.multiply(steps);
                multiplier.add_bias(args.bias, column, args.n);
                multiplier.write();
            });
            break;
        }
        case Role::sender:
        case Role::receiver:
        case Role::idle:
            break;
    }
    close_block<C>();
    if (threadIdx.x == 0) finish_call(args.workspace, waiter, epoch);
}

template <class Element>
cudaError_t launch_all_gather_gemm(const AllGatherGemmArgs& args, GemmVariant variant, int blocks,
                                   cudaStream_t stream) {
    const int tiles = args.raster.tiles() * args.workspace.world;
    const auto start = [&]<class C>() {
        return launch_blocks<C>(variant.n_major_b ? all_gather_gemm<C, Element, true>
                                                  : all_gather_gemm<C, Element, false>,
                                args, tiles, blocks, stream, args.push_blocks);
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
