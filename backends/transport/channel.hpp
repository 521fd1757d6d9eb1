// The channel by which kernels of all backends make bytes arrive at another rank, and signal the arrival
// there.
//
// A rank reaches another in one of three ways, which the plan's route between them names:
//   peer memory  on one node: the kernel stores into the peer's memory, then raises a word there
//   NIC          on two nodes: bytes of the own outbox are put into the peer's inbox, by a command that
//                the rank's proxy posts to a NIC; after them the peer's proxy adds to a word of its pad
//   staged       the same with outbox and inbox in pinned host memory, where the NIC does not reach the
//                device's; kernels copy into the one and out of the other
// In each way, a thread that sees the word raised sees the bytes. A kernel writes to a rank of another node
// by `Channel::command` alone; nothing else of that rank can be addressed.
//
// REUSE. The outbox may be written again when the NIC has read it: on a NIC that keeps order, when the peer
// has signalled that it got the bytes; on a NIC that does not, which may send them once more, when the proxy
// reports that they are complete (`Channel::completion`).
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"
#include "backends/transport/put_command.hpp"

namespace mkernel::transport {

// Bytes of the own outbox, and their place in a peer's inbox.
struct Put {
    std::uint64_t from = 0, to = 0, bytes = 0;
};

// The places of outbox and inbox: in one symmetric region, at these offsets on every rank.
struct Channel {
    std::uint32_t region = 0;
    std::uint64_t outbox = 0, inbox = 0;

    // Returns the command that puts the bytes at `peer`, a rank of another node, then adds 1 to word `signal`
    // of its pad.
    [[nodiscard]] MKERNEL_HOST_DEVICE PutCommand command(std::uint32_t peer, std::uint32_t signal,
                                                         const Put& put = {}) const {
        PutCommand command;
        command.local_offset = outbox + put.from;
        command.remote_offset = inbox + put.to;
        command.bytes = put.bytes;
        command.peer = peer;
        command.region = region;
        command.signal = signal;
        command.value = 1;
        return command;
    }

    // Returns the command that adds 1 to word `signal` of the own pad once all earlier commands are complete
    // here.
    [[nodiscard]] MKERNEL_HOST_DEVICE PutCommand completion(std::uint32_t signal) const {
        return command(PutCommand::kSelf, signal);
    }
};

}  // namespace mkernel::transport
