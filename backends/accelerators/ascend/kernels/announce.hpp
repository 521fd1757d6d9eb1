// The announcement of one rank to another that data is in place there.
#pragma once

#include "backends/accelerators/ascend/kernels/call.hpp"
#include "backends/transport/channel.hpp"

namespace mkernel::ascend {

using transport::Put;

// Adds one to a word of another rank's pad, after what this block has written before its latest fence. Same
// node: that is in the peer's memory already, and `put` is ignored. Other node: the NIC first puts those
// bytes. Returns false if the call was aborted or its deadline has passed.
template <class Core>
bool announce(Core& core, const CallArgs& call, std::uint32_t peer, std::uint32_t word,
              const Put& put = {}) {
    if (call.same_node(peer)) {
        core.tnotify(peer, call.peers[peer].pad, word, 1);
        return true;
    }
    return core.nic_put(call.channel.command(peer, word, put));
}
template <class Core>
bool announce(Core& core, const CallArgs& call, std::uint32_t peer, Remote word,
              const Put& put = {}) {
    return announce(core, call, peer, call.word(word), put);
}

}  // namespace mkernel::ascend
