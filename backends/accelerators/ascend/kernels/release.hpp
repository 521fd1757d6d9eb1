// The end of a kernel that reads what peers wrote: when all its blocks are through, every rank may
// write this epoch's inbox again, and add to its remote words (in epoch + 2; call.hpp).
//   finished     +1 by each block of the kernel; block 0 releases once all have
//   word s of the pad: +1 by rank s when it releases a call, each once, in order
// Every call releases in every view.
//
// Three properties hold in every interleaving, and are tried in them with this code and announce.hpp
// (tests/native/model/test_ascend_model.cpp), in one node and between two over NICs, where peers answer and
// where no peer does:
//   seen      a waiter for what this call announces sees everything that was written before it
//   released  an inbox or an outbox is not written again before the blocks that read it are through
//   counted   when calls have ended, each word stands at its expected count, whichever rank was ahead
#pragma once

#include "backends/accelerators/ascend/kernels/announce.hpp"

namespace mkernel::ascend {

// Releases the call. Called by every block, last. `finished`: a word of the plan. Returns false if a wait was
// aborted or timed out.
template <class Core>
bool release(Core& core, const CallArgs& args, std::uint32_t world, Local finished) {
    core.annotate(kNoAnnotation);
    core.fence();
    core.tnotify(args.rank, args.pad, args.word(finished), 1);
    if (core.index() != 0) return true;
    if (!core.twait(args.word(finished), core.count(), args.rank)) return false;
    for (std::uint32_t step = 1; step < world; ++step) {
        const std::uint32_t peer = (args.rank + step) % world;
        if (!announce(core, args, peer, args.rank)) return false;
    }
    return true;
}

// The memory that a block may write: the other ranks' releases, each waited for once.
template <class Core>
class Released {
  public:
    Released(Core& core, const CallArgs& args, std::uint32_t world)
        : core_(core), args_(args), world_(world) {}

    // Waits before a write to `peer`'s inbox or, on another node, a put there. Returns false if the wait was
    // aborted or timed out.
    bool wait(std::uint32_t peer) {
        const std::uint64_t bit = std::uint64_t{1} << peer;
        if (args_.epoch <= 2 || (known_ & bit) != 0) return true;
        known_ |= bit;
        // The last one of the releases that all calls before this one bring may still be to come.
        return core_.twait(peer, -1, peer);
    }

    // Waits before a write to the own outbox.
    bool wait_outbox() {
        for (std::uint32_t peer = 0; peer < world_; ++peer) {
            if (!args_.same_node(peer) && !wait(peer)) return false;
        }
        return true;
    }

  private:
    Core& core_;
    const CallArgs& args_;
    std::uint32_t world_;
    std::uint64_t known_ = 0;  // bit per rank
};

}  // namespace mkernel::ascend
