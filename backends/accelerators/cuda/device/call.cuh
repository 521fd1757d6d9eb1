// The end of a kernel's call, and the rule by which memory of the workspace may be used again.
//
// The rule: a call is over on a rank only when every rank of the world has signalled that it needs nothing of
// that call any more. Everything in the workspace's data area, and every flag, is therefore free for the next
// call from its first instruction, whatever op that is and in whatever order the copy engines start; and
// everything that a peer wrote into this rank's memory in this call has arrived.
//
// Brief calls are the exception, for exchanges in which a rank waits for something of every peer and
// for all that peers write into its memory, and that fit the brief part of the workspace: their rank
// goes on at once (`finish_brief_call`), which saves a round trip. What keeps a fast rank from overwriting
// what a slow peer still reads:
//   data   calls of even and of odd epochs have memory of their own. A rank in call e has received a
//          signal of every peer in call e - 1; each peer was then done with call e - 2, the last one that
//          used e's memory.
//   flags  a brief flag has the same writer in every call, and nothing else uses it. A flag that is
//          already at e + 1 was at e before, with e's data in place.
// Other calls may come before and after; they use neither.
//
// Ranks of other nodes send the same signal through the NIC. Their puts of a call have each been waited for
// when a rank is done, so "arrived" holds for them too. The own area may be written again when every peer is
// done, since each has then got all that was put to it; on a NIC that may repeat a put, when in addition the
// own proxy has reported the put complete.
//
// Three properties hold in every interleaving of the blocks of two ranks, and are tried in them with this
// code (tests/native/model/test_call_end_model.cpp), whole and brief, on one node and on two:
//   over    no memory of a call is written for the next one while any rank still reads it
//   seen    a reader of what came in a call sees all of it
//   number  every block of a call finds that call's epoch, and the next call counts its blocks from zero
//
// A user's symmetric buffer is different: its owner may still read it between two calls, so a rank that
// pushes into it first waits for the owner's `started` word (`announce_start`).
#pragma once

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/ptx/sync.cuh"
#include "backends/transport/device_wait.cuh"

namespace mkernel::cuda {

// Returns the waiter that kernels of this rank wait with.
__device__ inline transport::DeviceWaiter waiter_of(const Workspace& workspace,
                                                    const transport::WaitLimits& limits,
                                                    transport::Waiter kernel) {
    return {workspace.control().state, limits, kernel};
}

// Returns the diagnosis of a wait for a control word of that peer.
__device__ inline transport::Awaited awaited(std::uint32_t peer) {
    return {transport::kControlWord, peer, transport::kNoChunk};
}

// Announces to every peer that this rank is in call `epoch`, so that what it read or wrote before is done.
// Called by one thread of the grid; all ranks are on this node.
__device__ inline void announce_start(const Workspace& workspace, std::uint64_t epoch) {
    transport::fence_system();
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        workspace.control(peer).started[workspace.rank].set_fenced(epoch);
    }
}

// Waits until every peer has announced the call; returns whether all have. Called by one thread.
__device__ inline bool wait_for_starts(const Workspace& workspace,
                                       const transport::DeviceWaiter& waiter, std::uint64_t epoch) {
    for (int step = 1; step < workspace.world; ++step) {
        const auto peer = static_cast<std::uint32_t>((workspace.rank + step) % workspace.world);
        if (!waiter.until(workspace.control().started[peer], epoch, awaited(peer))) {
            return false;
        }
    }
    return true;
}

// Moves the epoch on, after everything else of call `epoch` on this rank. Called by one thread of the grid.
__device__ inline void move_on(Control& control, std::uint64_t epoch) {
    control.state.move_on(epoch);
    for (std::uint64_t& copy : control.epochs) copy = epoch + 1;
}

// Ends a call. Called by one thread of every block, after all the block's threads are done and its bulk
// stores are complete (`wait_group 0`). The last block signals the peers, waits for them, and moves the epoch
// on.
__device__ inline void finish_call(const Workspace& workspace,
                                   const transport::DeviceWaiter& waiter, std::uint64_t epoch) {
    if (workspace.world == 1) return;
    Control& control = workspace.control();
    ptx::fence_async_proxy();
    transport::fence_system();
    if (!control.state.is_last_block()) return;
    transport::fence_system();
    const Network& network = workspace.network;
    const auto own = static_cast<std::uint32_t>(workspace.rank);
    bool going = true;
    for (int number = 0; going && number < workspace.far(); ++number) {
        going = network.put(waiter, workspace.far_rank(number), own);
    }
    const bool completes = workspace.far() > 0 && !network.ordered;
    if (going && completes) going = network.ask_completion(waiter);
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        if (workspace.near(peer)) workspace.control(peer).finished[own].set_fenced(epoch);
    }
    for (int step = 1; going && step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        const auto from = static_cast<std::uint32_t>(peer);
        going = workspace.near(peer) ? waiter.until(control.finished[peer], epoch, awaited(from))
                                     : network.wait(waiter, from);
    }
    if (going && completes) network.wait(waiter, kCompletedWord);
    move_on(control, epoch);
}

// Signals to every peer of this node, before the end of the call and by that flag there, that this rank has
// written what it has for them: for one kernel of several in a call. Called by one thread of every block,
// after all the block's threads are done and have fenced (`fence_system`).
__device__ inline void tell_peers(const Workspace& workspace, std::uint64_t epoch,
                                  std::uint32_t flag) {
    if (workspace.world == 1) return;
    Control& control = workspace.control();
    transport::fence_system();
    if (!control.state.is_last_block()) return;
    control.state.blocks_done = 0;
    transport::fence_system();
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        if (!workspace.near(peer)) continue;
        workspace.flags(peer)[flag].set_fenced(epoch);
    }
}

// Ends a brief call, without waiting for any peer.
__device__ inline void finish_brief_call(const Workspace& workspace, std::uint64_t epoch) {
    Control& control = workspace.control();
    __threadfence();
    if (!control.state.is_last_block()) return;
    move_on(control, epoch);
}

// Returns the epoch of a brief call whose blocks need nothing else of the control words: every block reads it
// at its begin, and the last one that did moves it on. Called by one thread of every block; 0 in a world of
// one rank.
__device__ inline std::uint64_t epoch_of_brief_call(const Workspace& workspace) {
    if (workspace.world == 1) return 0;
    const std::uint64_t epoch = workspace.control().state.epoch;
    finish_brief_call(workspace, epoch);
    return epoch;
}

// A block of such a call, all of whose threads need the epoch. They go on as soon as they know it, the one that counts
// the block too: it asks for the number of blocks before it sends, and looks at it afterwards.
//
// A call of few blocks lets the next grid of its stream take its place on the device while it waits for peers. More
// could leave no multiprocessor to a peer that shares the device, and the next grid would wait for it in vain.
class BriefBlock {
  public:
    static constexpr unsigned kFewBlocks = 32;

    // Called by all threads of the block, after `ptx::wait_for_grid_before`. `waiting`: blocks that wait for peers.
    __device__ explicit BriefBlock(const Workspace& workspace, unsigned waiting = gridDim.x) {
        if (waiting <= kFewBlocks) ptx::let_next_grid_start();
        if (workspace.world == 1) return;
        __shared__ std::uint64_t of_block;
        transport::CallState& state = workspace.control().state;
        if (threadIdx.x == 0) of_block = state.epoch;
        __syncthreads();
        epoch_ = of_block;
        if (threadIdx.x == blockDim.x - 1) before_ = state.count_block();
    }
    // Moves the epoch on in the block that was counted last. Called by all threads, each when it has sent: while mail
    // is under way nothing waits for the fence, as the end of the grid would.
    __device__ void move_on(const Workspace& workspace) const {
        if (!transport::CallState::is_last(before_)) return;
        __threadfence();
        cuda::move_on(workspace.control(), epoch_);
    }

    // 0 in a world of one rank.
    __device__ std::uint64_t epoch() const { return epoch_; }

  private:
    std::uint64_t epoch_ = 0;
    std::uint32_t before_ = ~0u;
};

}  // namespace mkernel::cuda
