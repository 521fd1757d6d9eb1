// Which tiles a block computes, and in which order: always in rising order of the tile's number.
//
// By strides: cluster c of n takes tiles c, c + n, c + 2n, ... So a tile waits for one cluster, also
// while that has no multiprocessor. By claims: a cluster takes the next tile that no other has, from a counter in
// the own control words. A cluster that has no multiprocessor has no tile either, so a call goes on with
// whatever share of the multiprocessors it has: of all tiles that are not done, the first one belongs to
// a cluster that runs, or to the next one that claims, and waits for no later one.
//
// The loader of a cluster's first block claims, one tile ahead: the counter is asked when the loads of a
// tile begin, and the answer is told to all roles of all blocks of the cluster when they are under way. It
// goes through a ring in shared memory:
//   claims   loader of block 0 → loaders of the other blocks, storers, senders, multipliers
// kClaims is how many tiles a sender may be behind its loader before it holds that up.
#pragma once

#include "backends/accelerators/hopper/device/workspace.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// How tiles are shared out among `clusters`. Each tile has one number below `tiles`.
struct TileShare {
    std::uint32_t*
        counter;  // in the own control words, zero at the begin of a call; null: by strides
    int tiles;
    int clusters;
    int cluster;  // this one

    __device__ bool by_claims() const { return counter != nullptr; }
};

// Of a block, beside its loader: the storer, and warps of multipliers.
inline constexpr int kReaders = 1 + kMultipliers * kWarpgroup / kWarp;

// Whether this block claims for its cluster.
template <class C>
__device__ __forceinline__ bool claims_for_cluster() {
    return C::kCluster == 1 || ptx::block_in_cluster() == 0;
}

// The first claim, by the thread that has the role of the loader, before `open_block`, under which its
// latency hides.
template <class C>
__device__ __forceinline__ std::uint32_t first_claim(const TileShare& share) {
    return share.by_claims() && claims_for_cluster<C>() ? atomicAdd(share.counter, 1U) : 0;
}

// One thread, with the other inits of `open_block`. `readers`: of a block, beside its loader.
template <class C>
__device__ __forceinline__ void open_claims(Shared<C>& shared, int readers) {
    for (int slot = 0; slot < kClaims; ++slot) {
        shared.told[slot].init(1);
        shared.heard[slot].init(C::kCluster * readers + C::kCluster - 1);
    }
}

// Says that the claim in `slot` is read: one thread of a reader.
template <class C>
__device__ __forceinline__ void hear(Shared<C>& shared, int slot) {
    if constexpr (C::kCluster > 1) {
        shared.heard[slot].arrive_at(0);
    } else {
        shared.heard[slot].arrive();
    }
}

// Calls body(number) for each of this block's tiles: the loader.
template <class C, class Body>
__device__ __forceinline__ void load_tiles(Shared<C>& shared, const TileShare& share,
                                           std::uint32_t first, Body&& body) {
    if (!share.by_claims()) {
        for (int number = share.cluster; number < share.tiles; number += share.clusters) {
            body(number);
        }
        return;
    }
    const bool claims = claims_for_cluster<C>();
    std::uint32_t claimed = first;
    for (Cursor<kClaims> cursor;; cursor.next()) {
        const int slot = cursor.slot;
        if constexpr (C::kCluster == 1) {
            shared.heard[slot].wait(cursor.parity ^ 1);
            shared.claimed[slot] = claimed;
            shared.told[slot].arrive();
        } else {
            if (claims) shared.heard[slot].wait(cursor.parity ^ 1);
            shared.told[slot].expect(sizeof(claimed));
            if (claims) {
                for (int block = 0; block < C::kCluster; ++block) {
                    shared.told[slot].tell(&shared.claimed[slot], claimed, block);
                }
            } else {
                shared.told[slot].wait(cursor.parity);
                claimed = shared.claimed[slot];
                hear(shared, slot);
            }
        }
        const int number = static_cast<int>(claimed);
        if (number >= share.tiles) return;
        if (claims) claimed = atomicAdd(share.counter, 1U);
        body(number);
    }
}

// The same for any other reader: a single thread or, kWarps, whole warps.
template <class C, bool kWarps, class Body>
__device__ __forceinline__ void follow_tiles(Shared<C>& shared, const TileShare& share,
                                             Body&& body) {
    int number = share.cluster;
    Cursor<kClaims> cursor;
    while (true) {
        if (share.by_claims()) {
            shared.told[cursor.slot].wait(cursor.parity);
            number = static_cast<int>(shared.claimed[cursor.slot]);
            if constexpr (kWarps) __syncwarp();
            if (!kWarps || threadIdx.x % kWarp == 0) hear(shared, cursor.slot);
            cursor.next();
        }
        if (number >= share.tiles) return;
        body(number);
        if (!share.by_claims()) number += share.clusters;
    }
}

}  // namespace mkernel::hopper
