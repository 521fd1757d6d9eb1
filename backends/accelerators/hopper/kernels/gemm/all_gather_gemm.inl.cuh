// The kernel of all_gather_gemm.cuh; one object file a variant includes it.
#pragma once

#include <type_traits>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/transfer/bulk_copy.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"

namespace mkernel::hopper {

struct GatheredTile {
    int shard;
    int segment;
    int row;  // within the shard
    int column;
};

// Calls body(GatheredTile) for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_tile(const AllGatherGemmArgs& args, Body&& body) {
    const int tiles = args.raster.tiles() * args.workspace.world * args.segments;
    const int clusters = (static_cast<int>(gridDim.x) - args.push_blocks) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = (static_cast<int>(blockIdx.x) - args.push_blocks) / C::kCluster; index < tiles;
         index += clusters) {
        const int step = index / args.raster.tiles();
        int cluster_row = 0;
        int column = 0;
        args.raster.at(index - step * args.raster.tiles(), cluster_row, column);
        body(GatheredTile{(args.workspace.rank + step) % args.workspace.world,
                          step / args.workspace.world, (cluster_row * C::kCluster + block) * kTileM,
                          column * C::kTileN});
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

// The stages of one pusher.
inline constexpr int kPushStages = 4;
using PushRing = transfer::BulkRing<kPushStages>;

template <class C>
__device__ __forceinline__ PushRing ring_of(Shared<C>& shared, int pusher) {
    constexpr std::uint32_t kPiece = 16 << 10;
    static_assert(kPushers * kPushStages * kPiece <= C::kStages * C::kStageBytes);
    PushRing ring(reinterpret_cast<char*>(shared.stages[0]) + pusher * kPushStages * kPiece,
                  reinterpret_cast<ptx::Mbarrier*>(shared.slices[0]) + pusher * kPushStages,
                  kPiece);
    ring.init();
    return ring;
}

// The place of a chunk of a rank's rows among all rows, and its flag.
struct RowChunk {
    std::uint64_t at, bytes;
    std::uint64_t own;  // in its rank's rows
    int flag;

    __device__ RowChunk(const AllGatherGemmArgs& args, int source, int chunk,
                        int element_bytes = kElementBytes) {
        const std::uint64_t row_bytes = static_cast<std::uint64_t>(args.k) * element_bytes;
        const int first = chunk * args.chunk_rows;
        own = first * row_bytes;
        at = (static_cast<std::uint64_t>(source) * args.rows + first) * row_bytes;
        bytes = min(args.chunk_rows, args.rows - first) * row_bytes;
        flag = source * args.chunks + chunk;
    }
};

// Returns where rank `at` has the scales of the rows of `source`.
__device__ __forceinline__ float* gathered_scales(const AllGatherGemmArgs& args, int at,
                                                  int source) {
    const int each = args.scales.single ? 1 : args.rows;
    return reinterpret_cast<float*>(args.workspace.data(at) + args.scales.gathered_at) +
           std::int64_t{source} * each;
}

// Sends the scales of a chunk's rows to a peer, by plain stores that this thread has yet to publish.
__device__ __forceinline__ void push_scales(const AllGatherGemmArgs& args, int peer, int chunk) {
    const OperandScales& scales = args.scales;
    float* const to = gathered_scales(args, peer, args.workspace.rank);
    if (scales.single) {
        *to = *scales.own;
        return;
    }
    const int first = chunk * args.chunk_rows;
    const int end = min(first + args.chunk_rows, args.rows);
#pragma unroll 16
    for (int at = first; at < end; ++at) to[at] = scales.own[at];
}

// Pushes chunks, the work of a pushing block instead of tiles: each pusher has stages of its own, takes
// chunks in turn and publishes each by its flag. Chunks for the node's ranks go into their workspaces.
template <class In>
__device__ __forceinline__ void push_chunks(const AllGatherGemmArgs& args, PushRing& ring,
                                            int pusher, int pushers, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    for (int task = static_cast<int>(blockIdx.x) * pushers + pusher;
         task < (workspace.local - 1) * args.chunks; task += args.push_blocks * pushers) {
        const int step = task / args.chunks + 1;
        const int before = workspace.rank - workspace.first + workspace.local - step;
        const int peer = workspace.first + before % workspace.local;
        const RowChunk chunk(args, workspace.rank, task % args.chunks, sizeof(In));
        ring.copy(workspace.data(peer) + chunk.at, args.rows_to_push + chunk.own, chunk.bytes, 0,
                  1);
        if constexpr (sizeof(In) == 1) push_scales(args, peer, task % args.chunks);
        ring.complete();
        workspace.flags(peer)[chunk.flag].set(epoch);
    }
}

// Puts chunks for ranks of other nodes into the own area, once, and from there by the NIC to each.
__device__ __forceinline__ void push_to_nodes(const AllGatherGemmArgs& args, PushRing& ring,
                                              const transport::DeviceWaiter& waiter) {
    const Workspace& workspace = args.workspace;
    for (int task = static_cast<int>(blockIdx.x); task < args.chunks; task += args.push_blocks) {
        const RowChunk chunk(args, workspace.rank, task);
        ring.copy(workspace.network.area + chunk.at, args.rows_to_push + chunk.own, chunk.bytes, 0,
                  1);
        ring.complete();
        for (int number = 0; number < args.rails.peers(); ++number) {
            if (!workspace.network.put(waiter, args.rails.peer(number), kFirstArrival + chunk.flag,
                                       {chunk.at, chunk.at, chunk.bytes})) {
                return;
            }
        }
    }
}

// Passes on what came from other nodes: out of staging memory into the own workspace, and, hierarchically,
// into those of the node's other ranks.
__device__ __forceinline__ void land_chunks(const AllGatherGemmArgs& args, PushRing& ring,
                                            const transport::DeviceWaiter& waiter,
                                            std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    const bool staged = workspace.network.staged;
    const transport::SetWord* const come =
        staged ? workspace.landed() : workspace.flags(workspace.rank);
    const auto for_each_reader = [&](auto&& body) {
        const int readers = args.rails.hierarchical ? workspace.local : 1;
        for (int step = staged ? 0 : 1; step < readers; ++step) body(args.rails.neighbour(step));
    };
    const int sources = args.rails.peers();
    for (int task = static_cast<int>(blockIdx.x); task < sources * args.chunks;
         task += args.push_blocks) {
        const int source = args.rails.peer(task % sources);
        const RowChunk chunk(args, source, task / sources);
        if (!waiter.until(come[chunk.flag], epoch,
                          {kFirstArrival + chunk.flag, static_cast<std::uint32_t>(source),
                           static_cast<std::uint32_t>(task / sources)})) {
            return;
        }
        ptx::fence_async_proxy();
        ring.spread(workspace.network.area + chunk.at, chunk.bytes, 0, 1,
                    [&](std::uint64_t at, const char* piece, std::uint32_t bytes) {
                        for_each_reader([&](int reader) {
                            ptx::store_bytes(workspace.data(reader) + chunk.at + at, piece, bytes);
                        });
                    });
        ring.complete();
        for_each_reader([&](int reader) { workspace.flags(reader)[chunk.flag].set(epoch); });
    }
}

// Watches, by one warp, for the chunks that come from other nodes.
__device__ __forceinline__ void watch_chunks(const AllGatherGemmArgs& args,
                                             const transport::DeviceWaiter& waiter,
                                             std::uint64_t epoch, transport::Lane mine) {
    const Workspace& workspace = args.workspace;
    const Network& network = workspace.network;
    const auto chunks = static_cast<std::uint32_t>(args.chunks);
    network.watch(waiter, epoch,
                  network.staged ? workspace.landed() : workspace.flags(workspace.rank),
                  args.rails.first_source() * chunks, args.rails.sources_but_own(chunks), mine,
                  [&](std::uint32_t flag) { return flag / chunks; });
}

template <class C, class Element, bool kNMajorB, class In, int kLevels = 0>
__global__ void __launch_bounds__(kBlockThreads, 1)
    all_gather_gemm(const __grid_constant__ AllGatherGemmArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const std::uint64_t epoch = args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
    constexpr int kStep = kStepK<In>;
    constexpr bool kScaled = sizeof(In) == 1;
    const int steps = (args.k + kStep - 1) / kStep / args.segments;

    const bool pushes = static_cast<int>(blockIdx.x) < args.push_blocks;
    const bool by_nic =
        !kScaled && args.workspace.far() > 0;  // its storer then takes in what comes
    switch (role_here()) {
        case Role::loader: {
            if (pushes) {
                PushRing ring = ring_of(shared, 0);
                if (by_nic) push_to_nodes(args, ring, waiter);
                push_chunks<In>(args, ring, 0, by_nic ? 1 : kPushers, epoch);
                break;
            }
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](const GatheredTile& tile) {
                const Operands<C, kNMajorB, kStep> operands{&args.b, tile.column,
                                                            args.n - tile.column};
                const int rows = args.rows - tile.row;
                if (tile.shard == args.workspace.rank) {
                    const int first = tile.segment * steps;
                    operands.load(shared, cursor, &args.own, tile.row, rows, first, first + steps);
                    return;
                }
                const int each = (steps + args.slices - 1) / args.slices;
                for (int slice = 0; slice * each < steps; ++slice) {
                    wait_for_rows(args, waiter, epoch, tile.shard, tile.row, slice);
                    operands.load(shared, cursor, &args.gathered, tile.shard * args.rows + tile.row,
                                  rows, slice * each, min((slice + 1) * each, steps));
                }
            });
            break;
        }
        case Role::storer: {
            if (pushes && by_nic && !args.workspace.network.staged && !args.rails.hierarchical)
                break;
            if (pushes) {
                PushRing ring = ring_of(shared, 1);
                if (by_nic) {
                    land_chunks(args, ring, waiter, epoch);
                } else {
                    push_chunks<In>(args, ring, 1, kPushers, epoch);
                }
                break;
            }
            Storer<C> storer(shared);
            for_each_tile<C>(args, [&](const GatheredTile& tile) {
                storer.tile([&](const void* slice, int number) {
                    ptx::store_box(&args.out, slice, tile.column + number * kSliceN, tile.row,
                                   tile.shard + tile.segment);
                });
            });
            break;
        }
        case Role::multiplier: {
            if (pushes) {
                if (by_nic && blockIdx.x == 0 && threadIdx.x < kWarpgroup + kWarp) {
                    watch_chunks(args, waiter, epoch, {threadIdx.x - kWarpgroup, kWarp});
                }
                break;
            }
            Multiplier<C, Element, kNMajorB, In> multiplier(shared);
            for_each_tile<C>(args, [&](const GatheredTile& tile) {
                if constexpr (kScaled) {
                    const int rank = args.workspace.rank;
                    multiplier.multiply_scaled(
                        steps, args.scales, args.rows - tile.row, tile.column, args.n, [&] {
                            return (tile.shard == rank ? args.scales.own
                                                       : gathered_scales(args, rank, tile.shard)) +
                                   args.scales.of_rows(tile.row);
                        });
                } else if constexpr (kLevels > 0) {
                    multiplier.template multiply_segments<kLevels>(steps >> kLevels);
                } else {
                    multiplier.multiply(steps);
                }
                multiplier.add_bias(args.bias, tile.column, args.n);
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
    // Without tiles, the next kernel on the stream ends the call.
    if (threadIdx.x == 0 && args.raster.tiles() > 0 && args.workspace.world > 1) {
        finish_call(args.workspace, waiter, epoch);
    }
}

template <class Element, class In>
cudaError_t launch_all_gather_gemm(const AllGatherGemmArgs& args, GemmVariant variant, int blocks,
                                   cudaStream_t stream) {
    const int tiles = args.raster.tiles() * args.workspace.world * args.segments;
    const auto start = [&]<class C, int kLevels = 0>() {
        auto kernel = &all_gather_gemm<C, Element, false, In>;
        if constexpr (std::is_same_v<Element, In>) {
            const bool tree = args.levels > 0;
            if (tree && args.levels != kLevels) return cudaErrorInvalidValue;
            if (tree) kernel = &all_gather_gemm<C, Element, false, In, kLevels>;
            if (variant.n_major_b) {
                kernel = tree ? &all_gather_gemm<C, Element, true, In, kLevels>
                              : &all_gather_gemm<C, Element, true, In>;
            }
        } else if (variant.n_major_b || args.levels > 0) {
            return cudaErrorInvalidValue;
        }
        return launch_blocks<C>(kernel, args, tiles, blocks, stream, args.push_blocks);
    };
    switch (variant.tiling) {
        case Tiling::wide:
        case Tiling::deep:
            return start.template operator()<Wide, 1>();
        case Tiling::medium:
            return start.template operator()<Medium, 2>();
        case Tiling::narrow:
            return start.template operator()<Narrow, 2>();
        case Tiling::promoted:
            if constexpr (!std::is_same_v<Element, In>)
                return start.template operator()<Promoted>();
    }
    return cudaErrorInvalidValue;
}

}  // namespace mkernel::hopper
