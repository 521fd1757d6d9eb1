// The end of a kernel that reads what peers wrote: when all its blocks are through, every rank may
// write this epoch's parity of the workspace again (in epoch + 2).
//   finished     +1 by each block of the kernel; block 0 releases once all have
//   released(s)  +1 by rank s when it has finished a call: a put of epoch e waits for >= e - 2
#pragma once

#include "backends/accelerators/ascend/kernels/call.hpp"
#include "backends/nics/put_command.hpp"

namespace mkernel::ascend {

// Tells every other rank, directly or through the NIC. From one block. False if a wait was aborted.
template <class Core>
bool announce_release(Core& core, const CallArgs& args, std::uint32_t world,
                      std::uint32_t released) {
    for (std::uint32_t step = 1; step < world; ++step) {
        const std::uint32_t peer = (args.rank + step) % world;
        const std::uint32_t signal = args.signal_base + released + args.rank;
        if (args.same_node(peer)) {
            core.tnotify(peer, args.peers[peer].pad, signal, 1);
        } else if (!core.nic_put(
                       {.peer = peer, .region = args.region, .signal = signal, .value = 1})) {
            return false;
        }
    }
    return true;
}

// From every block, last. `released`, `finished`: signal indices, the former of rank 0. False if a
// wait was aborted or timed out.
template <class Core>
bool release(Core& core, const CallArgs& args, std::uint32_t world, std::uint32_t released,
             std::uint32_t finished) {
    core.annotate(kNoAnnotation);
    core.fence();
    core.tnotify(args.rank, args.pad, args.signal_base + finished, 1);
    if (core.index() != 0) return true;
    if (!core.twait(args.signal_base + finished, args.epoch * core.count(), args.rank)) {
        return false;
    }
    return announce_release(core, args, world, released);
}

// Before the first write to `peer`'s workspace.
template <class Core>
bool wait_released(Core& core, const CallArgs& args, std::uint32_t released, std::uint32_t peer) {
    if (args.epoch <= 2) return true;
    return core.twait(args.signal_base + released + peer, args.epoch - 2, peer);
}

}  // namespace mkernel::ascend
