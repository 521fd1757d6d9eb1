// The destinations of data that all other ranks get, and the division of the sending among blocks.
//
// Each same-node rank is one destination; all ranks of other nodes together are one more, whose items are
// packed once in the own outbox and sent from there. Where there are more blocks than destinations, blocks
// are dealt out evenly to destinations and share their items; otherwise (item, destination) pairs go
// round-robin over blocks. Before its first put to a destination a block waits until the destination has
// released epoch - 2, whose inbox is about to be overwritten.
#pragma once

#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend {

template <class Core>
class Destinations {
  public:
    Destinations(Core& core, const CallArgs& call, std::uint32_t world)
        : core_(core), released_(core, call, world) {
        for (std::uint32_t step = 1; step < world; ++step) {
            const std::uint32_t peer = (call.rank + step) % world;
            if (call.same_node(peer)) {
                near_[count_++] = peer;
            } else {
                far_[far_count_++] = peer;
            }
        }
        if (far_count_ > 0) near_[count_++] = kFar;
    }

    // Sends this block's share of `items` items, in order: near(peer, item) for each same-node rank, and
    // far(item) for all others. Returns false as soon as one of them does, or a wait was aborted.
    template <class Near, class Far>
    bool each(std::uint32_t items, const Near& near, const Far& far) {
        if (count_ == 0) return true;
        const auto send = [&](std::uint32_t which, std::uint32_t item) {
            const std::uint32_t destination = near_[which];
            if (!wait_released(destination)) return false;
            return destination == kFar ? far(item) : near(destination, item);
        };
        const std::uint32_t blocks = core_.count(), block = core_.index();
        if (blocks > count_) {
            const std::uint32_t which = block % count_, member = block / count_;
            const std::uint32_t members = (blocks - which + count_ - 1) / count_;
            for (std::uint32_t i = member; i < items; i += members) {
                if (!send(which, i)) return false;
            }
        } else {
            for (std::uint32_t i = block; i < items * count_; i += blocks) {
                if (!send(i % count_, i / count_)) return false;
            }
        }
        return true;
    }

    // The ranks of other nodes.
    [[nodiscard]] const std::uint32_t* begin() const { return far_; }
    [[nodiscard]] const std::uint32_t* end() const { return far_ + far_count_; }

  private:
    static constexpr std::uint32_t kFar = 0xffffffff;

    bool wait_released(std::uint32_t destination) {
        core_.annotate(kNoAnnotation);
        return destination == kFar ? released_.wait_outbox() : released_.wait(destination);
    }

    Core& core_;
    Released<Core> released_;
    std::uint32_t near_[kMaxWorld] = {};  // same-node ranks, then perhaps kFar
    std::uint32_t far_[kMaxWorld] = {};   // ranks of other nodes
    std::uint32_t count_ = 0, far_count_ = 0;
};

}  // namespace mkernel::ascend
