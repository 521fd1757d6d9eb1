// The kernel of gemm_reduce.cuh.
#pragma once

#include <type_traits>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/gemm_reduce.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/ptx/tensor_map.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"
#include "backends/accelerators/hopper/tile/store.cuh"
#include "backends/accelerators/hopper/tile/tile_forwarder.cuh"

namespace mkernel::hopper {

struct OwnedTile {
    int owner;
    int parts;   // of other ranks, which this one adds to its own
    int row;     // within the owner's rows
    int column;  // element
    int number;  // among the owner's tiles, in the order in which ranks compute them
    bool last;   // of this block
};

// Calls body(OwnedTile) for each of this block's tiles, in order. kResults: in the order in which sums of
// other owners are taken, not computed.
template <class C, bool kResults = false, class Body>
__device__ __forceinline__ void for_each_tile(const GemmReduceArgs& args, Body&& body) {
    const int world = args.workspace.world;
    const Rails& rails = args.rails;
    OwnerOrder order(args.raster, args.panel_rows, args.panel_columns, world, args.workspace.rank,
                     args.cluster_rows, kResults ? rails.shared_results() : rails.relayed());
    const int clusters = (static_cast<int>(gridDim.x) - args.network_blocks) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    const int count = order.tiles();
    for (int index = (static_cast<int>(blockIdx.x) - args.network_blocks) / C::kCluster;
         index < count; index += clusters) {
        int step = 0;
        int cluster_row = 0;
        int column = 0;
        int place = 0;
        order.at(index, step, cluster_row, column, place);
        body(OwnedTile{kResults ? rails.result_owner(step) : rails.owner(step),
                       kResults || args.alone ? 0 : rails.parts(step),
                       (cluster_row * C::kCluster + block) * kTileM, column * C::kTileN,
                       place * C::kCluster + block, index + clusters >= count});
    }
}

// The flags of tiles: see gemm_reduce.cuh.
struct TileFlags {
    const Workspace& workspace;
    int tiles;  // of an owner

    // Returns the place of `other` among the ranks except `at`, counted from at + 1 on.
    __device__ int slot(int other, int at) const {
        return (other - at - 1 + workspace.world) % workspace.world;
    }
    // Returns the flag that is set at `at` as `source`'s; `second`: the one for the sum, not the part.
    __device__ int number(int source, int at, int tile, bool second) const {
        return ((second ? workspace.world - 1 : 0) + slot(source, at)) * tiles + tile;
    }
    // Waits for the flag; `from` is the rank that sets it.
    __device__ bool wait(const transport::DeviceWaiter& waiter, std::uint64_t epoch, int source,
                         int from, int tile, bool second) const {
        const int flag = number(source, workspace.rank, tile, second);
        const bool come =
            waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                         {static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(from),
                          static_cast<std::uint32_t>(tile)});
        ptx::fence_async_proxy();
        return come;
    }
    __device__ void set(std::uint64_t epoch, int source, int at, int tile, bool second) const {
        workspace.flags(at)[number(source, at, tile, second)].set(epoch);
    }
};

// Tiles in the area for other nodes, by number. All nodes have as many ranks.
struct AreaTiles {
    const Rails& rails;
    int tiles;  // of an owner

    // Return the tile at rank `at`: the part from `source`; the part for `owner`; the sum from `owner`; the
    // own sum.
    __device__ int part_from(int source, int at, int tile) const {
        return rails.place_among_peers(source, at) * tiles + tile;
    }
    __device__ int part_for(int owner, int at, int tile) const {
        return (rails.peers() + rails.place_among_peers(owner, at)) * tiles + tile;
    }
    __device__ int sum_from(int owner, int at, int tile) const {
        return (2 * rails.peers() + rails.place_among_peers(owner, at)) * tiles + tile;
    }
    __device__ int own_sum(int tile) const { return 3 * rails.peers() * tiles + tile; }
};

// Maps of the peers' outputs that this block's storer puts its tiles into, for peers that publish where
// theirs are.
class PeerOutputs {
  public:
    __device__ explicit PeerOutputs(const GemmReduceArgs& args, std::uint64_t epoch)
        : args_(args),
          // Only brief calls use that memory otherwise, and this call is not brief.
          maps_(reinterpret_cast<CUtensorMap*>(args.workspace.brief(args.workspace.rank, epoch)) +
                blockIdx.x * kMaxRanks) {}

    // Finds the outputs once the peers have started.
    __device__ void find() {
        const Workspace& workspace = args_.workspace;
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            char* const out = args_.landings.of(workspace, peer);
            if (out == nullptr) continue;
            ptx::move_map(maps_ + peer, &args_.out_pieces, out);
            known_ |= 1u << peer;
        }
    }
    // Returns null where the tile goes through the workspace.
    [[nodiscard]] __device__ const CUtensorMap* of(int peer) const {
        return (known_ >> peer & 1u) != 0 ? maps_ + peer : nullptr;
    }

  private:
    const GemmReduceArgs& args_;
    CUtensorMap* maps_;
    std::uint32_t known_ = 0;
};

// Puts tile `from` of the own area into tile `to` of a peer's, and signals it by its flag.
template <class C>
__device__ __forceinline__ bool put_tile(const GemmReduceArgs& args,
                                         const transport::DeviceWaiter& waiter, int peer, int from,
                                         int to, int flag) {
    constexpr std::uint64_t kBytes = kTileM * C::kTileN * kElementBytes;
    return args.workspace.network.put(
        waiter, peer, kFirstArrival + flag,
        {args.area_offset + from * kBytes, args.area_offset + to * kBytes, kBytes});
}

// Watches, by one warp, for the tiles that come from other nodes: parts, and with AllReduce sums.
__device__ __forceinline__ void watch_tiles(const GemmReduceArgs& args, const Rails& rails,
                                            const TileFlags& flags,
                                            const transport::DeviceWaiter& waiter,
                                            std::uint64_t epoch, transport::Lane mine) {
    const Workspace& workspace = args.workspace;
    const int rank = workspace.rank;
    const auto tiles = static_cast<std::uint32_t>(flags.tiles);
    const std::uint32_t slots = workspace.world - 1;
    workspace.network.watch(waiter, epoch, workspace.flags(rank), rails.first_follower() * tiles,
                            rails.followers(tiles, args.everywhere), mine, [&](std::uint32_t flag) {
                                return (rank + 1 + flag / tiles % slots) % workspace.world;
                            });
}

template <class C, class Element, bool kNMajorB, class In>
__global__ void __launch_bounds__(kBlockThreads, 1)
    gemm_reduce(const __grid_constant__ GemmReduceArgs args) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const std::uint64_t epoch = world > 1 ? args.workspace.control().state.epoch : 0;
    constexpr int kStep = kStepK<In>;
    const int steps = (args.k + kStep - 1) / kStep;
    const int sources = args.alone ? 0 : world - 1;
    const TileFlags flags{args.workspace, args.raster.tiles() * C::kCluster};
    const Rails& rails = args.rails;
    const AreaTiles places{rails, flags.tiles};
    const bool by_nic = sources > 0 && args.workspace.far() > 0;
    const bool has_tiles = static_cast<int>(blockIdx.x) >= args.network_blocks;

    switch (role_here()) {
        case Role::loader: {
            if (!has_tiles) break;
            Cursor<C::kStages> cursor;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                const int row = tile.owner * args.rows + tile.row;
                if (args.is_given) {
                    load_tile(shared, cursor, &args.given, tile.column, row, 0);
                } else {
                    const Operands<C, kNMajorB, kStep> operands{&args.b, tile.column,
                                                                args.n - tile.column};
                    const int rows = min(args.rows - tile.row, args.m - row);
                    operands.load(shared, cursor, &args.a, row, rows, 0, steps);
                }
                for (int number = 0; number < tile.parts; ++number) {
                    const int source = rails.part_of(tile.owner, number);
                    const int from = rails.part_from(tile.owner, number);
                    flags.wait(waiter, epoch, source, from, tile.number, false);
                    if (args.workspace.near(from)) {
                        load_tile(shared, cursor, &args.inbox, tile.column, tile.row,
                                  flags.slot(source, rank));
                    } else {
                        load_tile(shared, cursor, &args.area, 0, 0,
                                  places.part_from(source, rank, tile.number));
                    }
                }
            });
            break;
        }
        case Role::storer: {
            if (!has_tiles) break;
            Storer<C> storer(shared);
            const bool pushes = args.everywhere && sources > 0;
            const bool tells = pushes && args.landings.told;
            PeerOutputs outputs(args, epoch);
            if (pushes && (args.symmetric || tells) && blockIdx.x == 0) {
                for (int step = 1; tells && step < world; ++step) {
                    args.landings.tell(args.workspace, (rank + step) % world);
                }
                announce_start(args.workspace, epoch);
            }
            bool may_push = !(args.symmetric || tells);
            std::uint32_t stored = 0;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                const bool own = tile.owner == rank;
                const int out_row = (args.everywhere ? rank * args.rows : 0) + tile.row;
                if (own && pushes) {
                    if (!may_push) {
                        may_push = wait_for_starts(args.workspace, waiter, epoch);
                        if (may_push && tells) outputs.find();
                    }
                    const int pace = tile.last ? 0 : args.pace;
                    storer.put(pace, [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.out_pieces, piece, tile.column + x, out_row + y, 0);
                        if (by_nic) {
                            ptx::store_box(&args.area_pieces, piece, x, y,
                                           places.own_sum(tile.number));
                        }
                        for (int step = 1; may_push && step < world; ++step) {
                            const int peer = (rank + step) % world;
                            if (!args.workspace.near(peer)) continue;
                            const CUtensorMap* const out =
                                args.symmetric ? &args.everyone[peer] : outputs.of(peer);
                            if (out != nullptr) {
                                ptx::store_box(out, piece, tile.column + x, out_row + y, 0);
                            } else {
                                ptx::store_box(&args.everyone[peer], piece, tile.column + x,
                                               tile.row + y, flags.slot(rank, peer));
                            }
                        }
                    });
                    if (args.symmetric) return;
                    ptx::fence_async_proxy();
                    for (int step = 1; step < world; ++step) {
                        const int peer = (rank + step) % world;
                        if (args.workspace.near(peer) && outputs.of(peer) == nullptr) {
                            flags.set(epoch, rank, peer, tile.number, true);
                        }
                    }
                    if (by_nic) tell_stored(shared, ++stored);
                } else if (own) {
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.out, slice, tile.column + number * kSliceN, out_row,
                                       0);
                    });
                } else if (sources == 0) {
                    storer.tile([](const void*, int) {});
                } else if (rails.puts_to(tile.owner)) {
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.area, slice, number * kSliceN, 0,
                                       places.part_for(tile.owner, rank, tile.number));
                    });
                    tell_stored(shared, ++stored);
                } else if (args.by_outbox) {
                    storer.tile([&](const void* slice, int number) {
                        ptx::store_box(&args.outbox, slice, tile.column + number * kSliceN,
                                       tile.row, flags.slot(tile.owner, rank));
                    });
                    tell_stored(shared, ++stored);
                } else {
                    const int taker = rails.taker(tile.owner);
                    const int as = rails.taken_as(tile.owner);
                    const int there = flags.slot(as, taker);
                    storer.put(args.pace, [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.inboxes[taker], piece, tile.column + x, tile.row + y,
                                       there);
                    });
                    ptx::fence_async_proxy();
                    flags.set(epoch, as, taker, tile.number, false);
                }
            });
            break;
        }
        case Role::sender: {
            if (!has_tiles || sources == 0 || !(args.by_outbox || by_nic)) break;
            TileForwarder<C> sender(shared, 0, C::kPieceBuffers / 2, args.pace);
            std::uint32_t stored = 0;
            bool going = true;
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                if (tile.owner == rank) {
                    if (!by_nic || !args.everywhere) return;
                    wait_stored(shared, ++stored);
                    for (int number = 0; going && number < rails.peers(); ++number) {
                        const int peer = rails.peer(number);
                        going = put_tile<C>(args, waiter, peer, places.own_sum(tile.number),
                                            places.sum_from(rank, peer, tile.number),
                                            flags.number(rank, peer, tile.number, true));
                    }
                    return;
                }
                if (rails.puts_to(tile.owner)) {
                    wait_stored(shared, ++stored);
                    going =
                        going && put_tile<C>(args, waiter, tile.owner,
                                             places.part_for(tile.owner, rank, tile.number),
                                             places.part_from(rank, tile.owner, tile.number),
                                             flags.number(rank, tile.owner, tile.number, false));
                    return;
                }
                if (!args.by_outbox) return;
                wait_stored(shared, ++stored);
                const int layer = flags.slot(tile.owner, rank);
                const int taker = rails.taker(tile.owner);
                const int as = rails.taken_as(tile.owner);
                const int there = flags.slot(as, taker);
                sender.tile(
                    [&](void* piece, ptx::Mbarrier* arrived, int x, int y) {
                        ptx::load_box(piece, &args.outbox_pieces, arrived, tile.column + x,
                                      tile.row + y, layer);
                    },
                    [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.inboxes[taker], piece, tile.column + x, tile.row + y,
                                       there);
                    });
                sender.complete();
                flags.set(epoch, as, taker, tile.number, false);
            });
            break;
        }
        case Role::receiver: {
            if (!has_tiles || sources == 0 || !args.everywhere) break;
            if (args.symmetric || args.landings.lands()) break;
            const int first =
                args.by_outbox ? C::kPieceBuffers / 2 : 0;  // those before: the sender's
            TileForwarder<C> receiver(shared, first, C::kPieceBuffers - first, 0);
            for_each_tile<C, true>(args, [&](const OwnedTile& tile) {
                if (tile.owner == rank) return;
                const bool comes_by_nic = rails.puts_to(tile.owner);
                const int from = comes_by_nic ? tile.owner : rails.taker(tile.owner);
                if (!flags.wait(waiter, epoch, tile.owner, from, tile.number, true)) return;
                const int layer = comes_by_nic ? places.sum_from(tile.owner, rank, tile.number)
                                               : flags.slot(tile.owner, rank);
                const int readers = comes_by_nic && rails.hierarchical ? rails.local : 1;
                receiver.tile(
                    [&](void* piece, ptx::Mbarrier* arrived, int x, int y) {
                        if (comes_by_nic) {
                            ptx::load_box(piece, &args.area_pieces, arrived, x, y, layer);
                        } else {
                            ptx::load_box(piece, &args.everyone[rank], arrived, tile.column + x,
                                          tile.row + y, layer);
                        }
                    },
                    [&](const void* piece, int x, int y) {
                        ptx::store_box(&args.out_pieces, piece, tile.column + x,
                                       tile.owner * args.rows + tile.row + y, 0);
                        for (int step = 1; step < readers; ++step) {
                            const int peer = rails.neighbour(step);
                            ptx::store_box(&args.everyone[peer], piece, tile.column + x,
                                           tile.row + y, flags.slot(tile.owner, peer));
                        }
                    });
                if (readers == 1) return;
                receiver.complete();
                for (int step = 1; step < readers; ++step) {
                    flags.set(epoch, tile.owner, rails.neighbour(step), tile.number, true);
                }
            });
            receiver.complete();
            break;
        }
        case Role::multiplier: {
            if (!has_tiles) {
                if (by_nic && blockIdx.x == 0 && threadIdx.x < kWarpgroup + kWarp) {
                    watch_tiles(args, rails, flags, waiter, epoch,
                                {threadIdx.x - kWarpgroup, kWarp});
                }
                break;
            }
            Multiplier<C, Element, kNMajorB, In> multiplier(shared);
            for_each_tile<C>(args, [&](const OwnedTile& tile) {
                const int own_steps = args.is_given ? 0 : steps;
                if constexpr (sizeof(In) == 1) {
                    const int row = tile.owner * args.rows + tile.row;
                    multiplier.multiply_scaled(
                        own_steps, args.scales, args.m - row, tile.column, args.n,
                        [&] { return args.scales.own + args.scales.of_rows(row); });
                } else {
                    multiplier.multiply(own_steps);
                }
                const int parts = args.is_given + tile.parts;
                for (int part = 0; part < parts; ++part) multiplier.add_tile();
                if (tile.owner == rank) multiplier.add_bias(args.bias, tile.column, args.n);
                multiplier.write();
            });
            break;
        }
        case Role::idle:
            break;
    }
    close_block<C>();
    if (threadIdx.x == 0 && world > 1) finish_call(args.workspace, waiter, epoch);
}

template <class Element, class In>
cudaError_t launch_gemm_reduce(const GemmReduceArgs& args, GemmVariant variant, int blocks,
                               cudaStream_t stream) {
    const int tiles = args.cluster_rows * args.raster.columns;
    const auto start = [&]<class C>() {
        auto kernel = &gemm_reduce<C, Element, false, In>;
        if constexpr (std::is_same_v<Element, In>) {
            if (variant.n_major_b) kernel = &gemm_reduce<C, Element, true, In>;
        } else if (variant.n_major_b) {
            return cudaErrorInvalidValue;
        }
        return launch_blocks<C>(kernel, args, tiles, blocks, stream, args.network_blocks);
    };
    switch (variant.tiling) {
        case Tiling::wide:
        case Tiling::deep:
            return start.template operator()<WideCarry>();
        case Tiling::medium:
            return start.template operator()<MediumCarry>();
        case Tiling::narrow:
            return start.template operator()<NarrowCarry>();
        case Tiling::promoted:
            if constexpr (!std::is_same_v<Element, In>) {
                return start.template operator()<PromotedCarry>();
            }
    }
    return cudaErrorInvalidValue;
}

}  // namespace mkernel::hopper
