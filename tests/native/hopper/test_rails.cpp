// Every pair of nodes exchanges each rank's data as often as the exchange says; a rank hears of just those
// that put to it, and the words that it watches are theirs. Reductions add every part once, and every sum comes
// to every rank once.
#include <cstdio>
#include <set>
#include <utility>

#include "backends/accelerators/cuda/device/rails.cuh"

using mkernel::cuda::Rails;
using mkernel::transport::WordPattern;

namespace {

std::set<int> peers_of(const Rails& rails) {
    std::set<int> found;
    for (int number = 0; number < rails.peers(); ++number) found.insert(rails.peer(number));
    return found;
}

// Words [rank][each], as AllGather's flags lie.
bool watches_peers_words(const Rails& rails, std::uint32_t each) {
    const WordPattern which = rails.sources_but_own(each);
    std::set<std::uint32_t> found;
    for (std::uint32_t item = 0; item < which.count; ++item) {
        found.insert(rails.first_source() * each + which.index(item));
    }
    std::set<std::uint32_t> wanted;
    for (const int peer : peers_of(rails)) {
        for (std::uint32_t word = 0; word < each; ++word) wanted.insert(peer * each + word);
    }
    return found == wanted && found.size() == which.count;
}

// Words of every other rank's [each], as they follow a rank, once or twice.
bool watches_followers(const Rails& rails, std::uint32_t each, bool twice) {
    const WordPattern which = rails.followers(each, twice);
    std::set<std::uint32_t> found;
    for (std::uint32_t item = 0; item < which.count; ++item) {
        found.insert(rails.first_follower() * each + which.index(item));
    }
    std::set<std::uint32_t> wanted;
    const int world = rails.world();
    for (const int peer : peers_of(rails)) {
        const std::uint32_t slot = (peer - rails.rank - 1 + world) % world;
        for (std::uint32_t word = 0; word < each; ++word) {
            wanted.insert(slot * each + word);
            if (twice) wanted.insert((world - 1 + slot) * each + word);
        }
    }
    return found == wanted && found.size() == which.count;
}

// Every rank's part of every owner's tiles is added once, where it is looked for, by somebody whose tile comes
// at a later stage of the order.
bool reduces(int nodes, int local, bool hierarchical) {
    const int world = nodes * local;
    std::set<std::pair<int, int>> taken;  // at whom, as whose
    const auto stage = [&](const Rails& rails, int step) {
        return step == 0 ? 2 : step >= world - rails.relayed() ? 1 : 0;
    };
    const auto step_of = [&](const Rails& rails, int owner) {
        int found = -1;
        for (int step = 0; step < world; ++step) {
            if (rails.owner(step) == owner) found = found < 0 ? step : world;  // once
        }
        return found;
    };
    for (int owner = 0; owner < world; ++owner) {
        std::set<int> added{owner};
        // `at` adds to its own part what others bring it, and so do those.
        const auto add = [&](auto&& self, int at) -> bool {
            const Rails rails{at, nodes, local, hierarchical};
            const int step = step_of(rails, owner);
            if (step < 0 || step >= world) return false;
            for (int number = 0; number < rails.parts(step); ++number) {
                const int from = rails.part_from(owner, number);
                const Rails theirs{from, nodes, local, hierarchical};
                if (!added.insert(from).second) return false;
                if (theirs.puts_to(owner) != (from / local != at / local)) return false;
                const bool by_nic = theirs.puts_to(owner);
                const int as = rails.part_of(owner, number);
                if (by_nic ? at != owner || as != from
                           : theirs.taker(owner) != at || theirs.taken_as(owner) != as)
                    return false;
                if (as == at || !taken.insert({at, as}).second) return false;
                if (by_nic && rails.place_among_peers(from, at) >= rails.peers()) return false;
                if (stage(theirs, step_of(theirs, owner)) >= stage(rails, step)) return false;
                if (!self(self, from)) return false;
            }
            return true;
        };
        if (!add(add, owner) || static_cast<int>(added.size()) != world) return false;
    }
    return true;
}

// Every owner's sum comes to every other rank once: by the NIC from the owner, or from a neighbour that takes
// it, by the NIC, at an earlier stage of the order.
bool spreads(int nodes, int local, bool hierarchical) {
    const int world = nodes * local;
    const auto step_of = [&](const Rails& rails, int owner) {
        int found = -1;
        for (int step = 0; step < world; ++step) {
            if (rails.result_owner(step) == owner) found = found < 0 ? step : world;  // once
        }
        return found;
    };
    const auto stage = [&](const Rails& rails, int step) {
        return step >= world - rails.shared_results() ? 1 : 0;
    };
    for (int at = 0; at < world; ++at) {
        const Rails rails{at, nodes, local, hierarchical};
        if (step_of(rails, at) != 0) return false;
        for (int owner = 0; owner < world; ++owner) {
            if (owner == at) continue;
            const int step = step_of(rails, owner);
            if (step < 1 || step >= world) return false;
            const int sharer = rails.taker(owner);
            if (rails.puts_to(owner)) {  // its owner puts it here
                if (peers_of({owner, nodes, local, hierarchical}).count(at) != 1) return false;
                if (hierarchical && stage(rails, step) != 0) return false;
            } else if (sharer / local != at / local || sharer == at) {
                return false;
            } else if (sharer != owner) {
                const Rails theirs{sharer, nodes, local, hierarchical};
                if (!theirs.puts_to(owner)) return false;
                if (stage(theirs, step_of(theirs, owner)) >= stage(rails, step)) return false;
            }
        }
    }
    return true;
}

bool check(int nodes, int local, bool hierarchical) {
    const int world = nodes * local;
    for (int rank = 0; rank < world; ++rank) {
        const Rails rails{rank, nodes, local, hierarchical};
        const std::set<int> peers = peers_of(rails);
        const int each_node = hierarchical ? 1 : local;
        if (static_cast<int>(peers.size()) != (nodes - 1) * each_node) return false;
        for (const int peer : peers) {
            if (peer / local == rank / local) return false;
            if (hierarchical && peer % local != rank % local) return false;
            if (peers_of({peer, nodes, local, hierarchical}).count(rank) != 1) return false;
        }
        std::set<int> neighbours;
        for (int step = 0; step < local; ++step) neighbours.insert(rails.neighbour(step));
        if (static_cast<int>(neighbours.size()) != local || rails.neighbour(0) != rank)
            return false;
        for (const int neighbour : neighbours) {
            if (neighbour / local != rank / local) return false;
        }
        for (const std::uint32_t words : {1u, 3u, 7u}) {
            if (!watches_peers_words(rails, words)) return false;
            if (!watches_followers(rails, words, false)) return false;
            if (!watches_followers(rails, words, true)) return false;
        }
    }
    return (hierarchical && local == 1) ||
           (reduces(nodes, local, hierarchical) && spreads(nodes, local, hierarchical));
}

}  // namespace

int main() {
    for (int nodes = 1; nodes <= 5; ++nodes) {
        for (int local = 1; local <= 5; ++local) {
            for (const bool hierarchical : {false, true}) {
                if (check(nodes, local, hierarchical)) continue;
                std::printf("%d nodes x %d ranks, %s\n", nodes, local,
                            hierarchical ? "hierarchical" : "direct");
                return 1;
            }
        }
    }
    return 0;
}
