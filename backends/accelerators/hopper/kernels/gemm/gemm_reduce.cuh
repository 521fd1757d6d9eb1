// GEMM+ReduceScatter and GEMM+AllReduce: sums over ranks of a @ b, each tile summed by its owner.
//
// Rank o owns rows [o * rows, (o + 1) * rows) of the M of the sum. Data flow of one call on rank r:
//   a, b ──▶ tiles of the other owners' rows ──storer──▶ rounded, put into the inbox of the owner, or,
//            `by_outbox`, into the own outbox and from there ──sender──▶ the inbox; then the tile's
//            flag there is set to the epoch
//   a, b ──▶ tiles of the own rows; a tile stays in registers, and those of ranks r + 1, r + 2, ...
//            are added from the inbox in that order, in float32, as their flags come ──▶ rounded
//            once ──storer──▶ out
// AllReduce besides:
//   own tiles ──storer──▶ out of every peer where it is symmetric, or where that peer publishes a place
//            for it (device/landing.cuh); the end of the call signals that all has arrived. Else the
//            gathered area of that peer, then the second flag there, and
//   gathered area ──receiver──▶ out
// Between nodes the parts of an owner's tiles go into the own area, and from there ──sender──▶ by the NIC
// into the owner's; with AllReduce own tiles go into it too, ──sender──▶ into every such peer's. There the
// arrivals ──multipliers of block 0, which has no tiles──▶ flags, and loader and receiver find the tiles in
// the area. A tile is one put: it lies in one piece there, 128 rows of the tile's width.
// Hierarchically (device/rails.cuh) a rank is the relay of its node for the owners on its rail:
// its neighbours put their parts of those owners' tiles into its inbox as they do those of its own tiles, and it
// adds them to its own in the same way, in float32, in the order of the node from itself on; rounded once, the
// sum leaves by the NIC as above. The owner adds its neighbours' parts first, then the sums of nodes n + 1,
// n + 2, ... So the order of additions is fixed, and differs from the direct one. With AllReduce the sum goes
// back the same way: to the relay of each other node, whose receiver writes it to `out` and into the gathered
// areas of its neighbours, and sets their flags.
// No rank waits for ever: its tiles are taken in rising order of one number, the same for a tile on all ranks
// of its stage, and those that wait come after what they wait for: relayed tiles of a panel after all parts of
// it that neighbours take, own ones after all relayed ones. Of all tiles that are not done the one that comes
// first waits for no other. The warps that watch for other nodes have blocks of their own, which have no
// tiles. Receivers hold up receivers only: they take sums in an order of their own, of each panel those from
// other nodes before those that neighbours take from other nodes for them.
// Traffic on the link is spread over the whole call: an owner's tiles are cut into panels, and the own tiles
// of a panel are computed after the other owners' tiles of the next. Puts keep a pace (tile/store.cuh states
// why), except those of a block's last tile: it has no more loads to hold up.
//
// Workspace, each [W - 1, rows, N]: inbox, by source: (s - r - 1) mod W (what a relay takes: by the rank with
// the source's place in the owner's node); then, where the call uses them,
// outbox and gathered, by owner: (o - r - 1) mod W. The area for other nodes, each [F, tiles of an owner],
// of the F ranks there as they follow this node's: parts from them, parts for them; AllReduce: sums from
// them, and [tiles] of own sums. Flag of a tile of source s at rank r: ((s - r - 1)
// mod W) * tiles of an owner + its number; the second flags, of owner s, follow those of all sources. Tiles of an
// owner are numbered in the order in which ranks compute them (tile/raster.cuh), so that those that finish
// together lie side by side in the area, and their puts are neighbours.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/landing.cuh"
#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/tile/boxes.cuh"
#include "backends/accelerators/hopper/tile/raster.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

struct GemmReduceArgs {
    Boxes a;  // [M, K]
    Boxes b;
    CUtensorMap inbox;                // whole slices
    CUtensorMap inboxes[kMaxRanks];   // the peers', in pieces
    CUtensorMap outbox;               // whole slices
    CUtensorMap outbox_pieces;        // the same memory, in pieces
    CUtensorMap everyone[kMaxRanks];  // every rank's gathered area, or symmetric out; in pieces
    CUtensorMap area;                 // for other nodes, [tiles, 128, kTileN], whole slices
    CUtensorMap area_pieces;          // the same memory, in pieces
    CUtensorMap given;                // [M, N], whole slices: see `is_given`
    CUtensorMap out;                  // [1, rows or M, N], whole slices
    CUtensorMap out_pieces;           // the same memory, in pieces
    const void* bias;                 // [N], added once, by the owner; or null
    OperandScales scales;  // of e4m3 operands; parts are multiplied by them, then rounded
    Workspace workspace;
    transport::WaitLimits limits;
    Raster raster;  // of an owner's rows and all columns
    int cluster_rows;  // of all owners: of the last ones of an AllReduce within a node only those that are there
    int panel_rows;     // of clusters
    int panel_columns;  // of tiles
    int pace;           // least clock cycles from one piece that is put to the next
    int m;              // rows of a
    int rows, n, k;
    bool by_outbox;
    bool everywhere;    // AllReduce: `out` has all rows, on every rank
    bool symmetric;     // and may be written by peers, who all have its address
    Landings landings;  // else; `told` within a node only
    Rails rails;
    bool alone;  // exchange nothing; for timing the products alone
    bool
        is_given;  // the rank's product is there already, rounded: exchange it, and multiply nothing
    int network_blocks;  // the first ones, whole clusters: they have no tiles, and tend the network
    std::uint64_t area_offset;  // of the area, in the network's
};

// Launches on `blocks` blocks (0: one an SM). Element, In: as those of
// AllGather+GEMM.
template <class Element, class In>
cudaError_t launch_gemm_reduce(const GemmReduceArgs& args, GemmVariant variant, int blocks,
                               cudaStream_t stream);

}  // namespace mkernel::hopper
