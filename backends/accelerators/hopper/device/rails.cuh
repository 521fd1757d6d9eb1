// Who exchanges what with whom between nodes, directly or hierarchically. Plain arithmetic, for host and
// device.
//
// Ranks count node by node, `local` on each. The *rail* of a rank are the ranks that have its place in
// their nodes. Directly, every pair of ranks of two nodes exchanges by the NIC. Hierarchically only the
// ranks of a rail do, each for its whole node: it is the *relay* there of what the others on its rail have
// for this node, or this node for them.
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"
#include "backends/transport/republish.hpp"

namespace mkernel::hopper {

struct Rails {
    int rank, world, local;
    bool hierarchical;

    [[nodiscard]] MKERNEL_HOST_DEVICE int nodes() const { return world / local; }
    [[nodiscard]] MKERNEL_HOST_DEVICE int node() const { return rank / local; }
    // Its place in its node.
    [[nodiscard]] MKERNEL_HOST_DEVICE int place() const { return rank % local; }

    // Ranks of other nodes that this one exchanges with by the NIC; the `number`th of them, in the order in
    // which they follow this node's.
    [[nodiscard]] MKERNEL_HOST_DEVICE int peers() const {
        return hierarchical ? nodes() - 1 : world - local;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE int peer(int number) const {
        const int first = hierarchical ? rank + local : rank - place() + local;
        return (first + number * (hierarchical ? local : 1)) % world;
    }
    // The rank `step` after this one in its node, round and round.
    [[nodiscard]] MKERNEL_HOST_DEVICE int neighbour(int step) const {
        return node() * local + (place() + step) % local;
    }

    // Of words of which every rank has `each` in a row: the first rank's that is one of `peers`, or would
    // be if it were not of this node, and from there on those of all peers.
    [[nodiscard]] MKERNEL_HOST_DEVICE int first_source() const {
        return hierarchical ? place() : 0;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE transport::WordPattern sources_but_own(
        std::uint32_t each) const {
        const std::uint32_t node_words = local * each;
        if (!hierarchical) return {peers() * each, node() * node_words, node_words};
        return {peers() * each, node() * each, node_words, each, node_words};
    }
};

}  // namespace mkernel::hopper
