// How a rank tells another one that something is in place there.
#pragma once

#include "backends/accelerators/ascend/kernels/call.hpp"
#include "backends/transport/put_command.hpp"

namespace mkernel::ascend {

// Bytes of the own outbox, and where they go in a peer's inbox.
struct Put {
    std::uint64_t from = 0, to = 0, bytes = 0;
};

// Adds one to a word of another rank's pad, behind what this block has written before its latest fence.
// Same node: that is in the peer's memory already, and `put` is not looked at. Other node: the NIC first
// puts those bytes. False if the call was aborted or its deadline has passed.
template <class Core>
bool announce(Core& core, const CallArgs& call, std::uint32_t peer, std::uint32_t word,
              const Put& put = {}) {
    if (call.same_node(peer)) {
        core.tnotify(peer, call.peers[peer].pad, word, 1);
        return true;
    }
    return core.nic_put({.local_offset = call.outbox_offset + put.from,
                         .remote_offset = call.inbox_offset + put.to,
                         .bytes = put.bytes,
                         .peer = peer,
                         .region = call.region,
                         .signal = word,
                         .value = 1});
}
template <class Core>
bool announce(Core& core, const CallArgs& call, std::uint32_t peer, Remote word,
              const Put& put = {}) {
    return announce(core, call, peer, call.word(word), put);
}

}  // namespace mkernel::ascend
