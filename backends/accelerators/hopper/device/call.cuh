// How a call of a kernel ends, and with it why memory of the region may be used again.
//
// One rule for every op: a call is over on a rank only when every rank of the world has said that it
// needs nothing of that call any more. So whatever lies in the region's data area, and any flag, is
// free for the next call from its first instruction, whatever op that is and in whatever order the
// copy engines start; and whatever a peer wrote into this rank's memory in this call has arrived.
// A user's symmetric buffer is another matter: its owner may still read it between two calls, so who
// pushes into it first waits for the owner's `started` word (`announce_start`).
#pragma once

#include "backends/accelerators/hopper/device/wait.cuh"

namespace mkernel::hopper {

// Tells every peer that this rank is in call `epoch`: what it read or wrote before is done. One
// thread of the grid.
__device__ inline void announce_start(const Region& region, std::uint64_t epoch) {
    ptx::fence_system();
    for (int step = 1; step < region.world; ++step) {
        const int peer = (region.rank + step) % region.world;
        ptx::store_relaxed(&region.control(peer).started[region.rank], epoch);
    }
}

// Whether every peer has announced the call. One thread.
__device__ inline bool wait_for_starts(const Region& region, const Waiter& waiter,
                                       std::uint64_t epoch) {
    for (int step = 1; step < region.world; ++step) {
        const auto peer = static_cast<std::uint32_t>((region.rank + step) % region.world);
        if (!waiter.until(&region.control().started[peer], epoch, {kControlWord, peer, kNoChunk})) {
            return false;
        }
    }
    return true;
}

// The end of a call; one thread of every block, after all the block's threads are done and its bulk
// stores complete (`wait_group 0`). The last block tells the peers, waits for them, and moves the
// epoch on.
__device__ inline void finish_call(const Region& region, const Waiter& waiter,
                                   std::uint64_t epoch) {
    if (region.world == 1) return;
    Control& control = region.control();
    ptx::fence_async_proxy();
    ptx::fence_system();
    if (atomicAdd(&control.blocks_done, 1u) != gridDim.x * gridDim.y * gridDim.z - 1) return;
    ptx::fence_system();
    for (int step = 1; step < region.world; ++step) {
        const int peer = (region.rank + step) % region.world;
        ptx::store_relaxed(&region.control(peer).finished[region.rank], epoch);
    }
    for (int step = 1; step < region.world; ++step) {
        const auto peer = static_cast<std::uint32_t>((region.rank + step) % region.world);
        if (!waiter.until(&control.finished[peer], epoch, {kControlWord, peer, kNoChunk})) break;
    }
    control.blocks_done = 0;
    control.epoch = epoch + 1;
    for (std::uint64_t& copy : control.epochs) copy = epoch + 1;
}

}  // namespace mkernel::hopper
