// Every pair of nodes exchanges each rank's data as often as the exchange says; a rank hears of just those
// that put to it, and the words that it watches are theirs.
#include <cstdio>
#include <set>

#include "backends/accelerators/hopper/device/rails.cuh"

using mkernel::hopper::Rails;
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

bool check(int nodes, int local, bool hierarchical) {
    const int world = nodes * local;
    for (int rank = 0; rank < world; ++rank) {
        const Rails rails{rank, world, local, hierarchical};
        const std::set<int> peers = peers_of(rails);
        const int each_node = hierarchical ? 1 : local;
        if (static_cast<int>(peers.size()) != (nodes - 1) * each_node) return false;
        for (const int peer : peers) {
            if (peer / local == rank / local) return false;
            if (hierarchical && peer % local != rank % local) return false;
            if (peers_of({peer, world, local, hierarchical}).count(rank) != 1) return false;
        }
        std::set<int> neighbours;
        for (int step = 0; step < local; ++step) neighbours.insert(rails.neighbour(step));
        if (static_cast<int>(neighbours.size()) != local || rails.neighbour(0) != rank) return false;
        for (const int neighbour : neighbours) {
            if (neighbour / local != rank / local) return false;
        }
        for (const std::uint32_t words : {1u, 3u, 7u}) {
            if (!watches_peers_words(rails, words)) return false;
        }
    }
    return true;
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
