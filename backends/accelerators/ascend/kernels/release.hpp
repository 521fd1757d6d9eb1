// The end of a kernel that reads what peers wrote: when all its blocks are through, every rank may
// write this epoch's parity of the workspace again (in epoch + 2).
//   finished     +1 by each block of the kernel; block 0 releases once all have
//   released(s)  +1 by rank s when it has finished a call: a put of epoch e waits for >= e - 2
#pragma once

#include "backends/accelerators/ascend/kernels/announce.hpp"

namespace mkernel::ascend {

// Tells every other rank, directly or through the NIC. From one block. False if a wait was aborted.
template <class Core>
bool announce_release(Core& core, const CallArgs& args, std::uint32_t world,
                      std::uint32_t released) {
    for (std::uint32_t step = 1; step < world; ++step) {
        const std::uint32_t peer = (args.rank + step) % world;
        if (!announce(core, args, peer, released + args.rank)) return false;
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

// Whose workspaces a block may write: those of ranks that have released epoch - 2, each waited for
// once.
template <class Core>
class Released {
  public:
    // `released`: signal index of rank 0.
    Released(Core& core, const CallArgs& args, std::uint32_t released)
        : core_(core), args_(args), signal_(args.signal_base + released) {}

    // Before a write to `peer`'s workspace. False if the wait was aborted or timed out.
    bool wait(std::uint32_t peer) {
        const std::uint64_t bit = std::uint64_t{1} << peer;
        if (args_.epoch <= 2 || (known_ & bit) != 0) return true;
        known_ |= bit;
        return core_.twait(signal_ + peer, args_.epoch - 2, peer);
    }

  private:
    Core& core_;
    const CallArgs& args_;
    std::uint32_t signal_;
    std::uint64_t known_ = 0;  // bit per rank
};

}  // namespace mkernel::ascend
