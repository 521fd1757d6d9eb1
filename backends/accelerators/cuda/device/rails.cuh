// The pattern of exchange between nodes, directly or hierarchically: which rank exchanges what with which.
// What this file computes is plain arithmetic, for host and device.
//
// Ranks count node by node, `local` on each. The *rail* of a rank is formed by the ranks that have its place
// in their nodes. Directly, every pair of ranks of two nodes exchanges by the NIC. Hierarchically only the
// ranks of a rail do, each for its whole node: a rank is the *relay* in its node for what the other ranks of
// its rail have for this node, and for what this node has for them.
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"
#include "backends/transport/republish.hpp"

namespace mkernel::cuda {

struct Rails {
    int rank, nodes, local;
    bool hierarchical;

    [[nodiscard]] MKERNEL_HOST_DEVICE int world() const { return nodes * local; }
    [[nodiscard]] MKERNEL_HOST_DEVICE int node() const { return rank / local; }
    // The rank's place in its node.
    [[nodiscard]] MKERNEL_HOST_DEVICE int place() const { return rank % local; }

    // The number of ranks of other nodes that this one exchanges with by the NIC. `peer` returns the
    // `number`th of them, in the order in which they follow this node's.
    [[nodiscard]] MKERNEL_HOST_DEVICE int peers() const {
        return hierarchical ? nodes - 1 : world() - local;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE int peer(int number) const {
        const int first = hierarchical ? rank + local : rank - place() + local;
        return (first + number * (hierarchical ? local : 1)) % world();
    }
    // Returns the place of `other` among the peers of `at`, which are as many.
    [[nodiscard]] MKERNEL_HOST_DEVICE int place_among_peers(int other, int at) const {
        const int after = (other - at + world()) % world();
        return hierarchical ? after / local - 1 : after - (local - at % local);
    }
    // Returns the rank `step` after this one in its node, wrapping around.
    [[nodiscard]] MKERNEL_HOST_DEVICE int neighbour(int step) const {
        return node() * local + (place() + step) % local;
    }

    // Reductions: owners in the order of steps 1, 2, ... (tile/raster.cuh), 0 being this rank. Hierarchically
    // the owners whose sums over this node a neighbour makes come first, other nodes' before this one's, and
    // the `relayed` ones, whose sums this rank makes, come last.
    [[nodiscard]] MKERNEL_HOST_DEVICE int relayed() const { return hierarchical ? peers() : 0; }
    [[nodiscard]] MKERNEL_HOST_DEVICE int owner(int step) const {
        if (!hierarchical || step == 0) return (rank + step) % world();
        const int away = step - 1 - nodes * (local - 1);
        if (away >= 0) return peer(away);
        const int to = (node() + 1 + (step - 1) / (local - 1)) % nodes;
        return to * local + (place() + 1 + (step - 1) % (local - 1)) % local;
    }
    // Returns true where the NIC carries what this rank has for that owner.
    [[nodiscard]] MKERNEL_HOST_DEVICE bool puts_to(int owner) const {
        return owner / local != node() && (!hierarchical || owner % local == place());
    }
    // Otherwise a rank of this node takes it: the owner, or its relay. `taken_as` returns as whose it is
    // taken, since a relay takes data for several nodes from each neighbour: that of the rank with this one's
    // place in the owner's node.
    [[nodiscard]] MKERNEL_HOST_DEVICE int taker(int owner) const {
        return node() * local + owner % local;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE int taken_as(int owner) const {
        return owner / local * local + place();
    }
    // The number of other ranks' parts that this rank adds to its own of a tile of that step's owner;
    // hierarchically those of its neighbours come first, then the sums of other nodes.
    [[nodiscard]] MKERNEL_HOST_DEVICE int parts(int step) const {
        if (step == 0) return hierarchical ? local - 1 + peers() : world() - 1;
        return hierarchical && step > nodes * (local - 1) ? local - 1 : 0;
    }
    // `part_of` returns as whose the `number`th of them is taken, `part_from` which rank sends it.
    [[nodiscard]] MKERNEL_HOST_DEVICE int part_of(int owner, int number) const {
        if (!hierarchical) return (rank + 1 + number) % world();
        if (number >= local - 1) return peer(number - (local - 1));
        return owner / local * local + (place() + 1 + number) % local;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE int part_from(int owner, int number) const {
        const bool by_relay = hierarchical && number < local - 1;
        return by_relay ? neighbour(1 + number) : part_of(owner, number);
    }

    // AllReduce: the ranks whose sums a rank takes, in the order of steps 1, 2, ...; hierarchically those
    // that it shares with its neighbours come first, and the `shared_results` ones, which neighbours share
    // with it, come last.
    [[nodiscard]] MKERNEL_HOST_DEVICE int shared_results() const {
        return hierarchical ? world() - 1 - peers() : 0;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE int result_owner(int step) const {
        if (!hierarchical || step == 0) return owner(step);
        return step <= peers() ? peer(step - 1) : owner(step - peers());
    }

    // Words of which every rank has `each` in a row: `first_source` returns the first rank that is one of the
    // peers, or would be if it were not of this node; `sources_but_own` returns the words of all peers, from
    // that rank's on.
    [[nodiscard]] MKERNEL_HOST_DEVICE int first_source() const {
        return hierarchical ? place() : 0;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE transport::WordPattern sources_but_own(
        std::uint32_t each) const {
        const std::uint32_t node_words = local * each;
        if (!hierarchical) return {peers() * each, node() * node_words, node_words};
        return {peers() * each, node() * each, node_words, each, node_words};
    }
    // Words of which every other rank has `each`, in the order in which the ranks follow this one, and a
    // second time after those if `twice`: `first_follower` returns the first rank that is a peer, `followers`
    // the words of all peers, from that one's on.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t first_follower() const {
        return local - 1 - (hierarchical ? 0 : place());
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE transport::WordPattern followers(std::uint32_t each,
                                                                       bool twice) const {
        const std::uint32_t once = peers() * each;
        const std::uint32_t all = (world() - 1) * each;
        const std::uint32_t count = twice ? 2 * once : once;
        if (!hierarchical) return {count, once, all - once};
        return {count, once, (local - 1) * each, each, local * each};
    }
};

}  // namespace mkernel::cuda
