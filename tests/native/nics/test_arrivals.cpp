// Groups of messages put together again, against a model of what queue pairs and completion queues
// may do to them.
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "backends/nics/verbs/arrivals.hpp"
#include "backends/nics/verbs/wr_id.hpp"
#include "check.hpp"

using namespace mkernel::nics;
using verbs::Arrivals;
using verbs::Kind;
using verbs::pack_group;

namespace {

constexpr std::uint32_t kReceives = 48;

struct Message {
    std::uint64_t group = 0;
    std::uint32_t immediate = 0;
};

// One lane: what is on its way, in any order where `ordered` is false, and what lies in the
// receiver's completion queue, for which there are kReceives receives.
struct Wire {
    std::vector<Message> flying;
    std::deque<Message> queue;
};

// `groups` puts over `lanes` lanes; a number is used again when its last use is in the queues. The
// receiver looks at one lane's queue for long stretches and forgets the others.
void play(std::uint32_t lanes, bool ordered, std::uint32_t groups, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Arrivals arrivals(lanes, kReceives);
    std::vector<Wire> wires(lanes);
    std::map<std::uint64_t, std::uint32_t> flying;  // messages of a group that are
    std::vector<std::uint32_t> raised(groups);
    std::uint64_t begun = 0;
    std::uint64_t ahead = 0;  // the most that a lane was before another
    std::vector<std::uint64_t> latest(lanes);
    std::uint32_t favourite = 0;
    const auto done = [&] {
        if (begun < groups || !flying.empty()) return false;
        for (const Wire& wire : wires) {
            if (!wire.queue.empty()) return false;
        }
        return true;
    };
    while (!done()) {
        switch (random() % 4) {
            case 0:  // a new group
                if (begun == groups ||
                    (begun >= verbs::kGroups && flying.contains(begun - verbs::kGroups))) {
                    break;
                }
                for (std::uint32_t lane = 0; lane < lanes; ++lane) {
                    const auto id = static_cast<std::uint32_t>(begun % verbs::kGroups);
                    const auto parts = static_cast<std::uint32_t>(1 + (ordered ? 0 : random() % 3));
                    const std::uint32_t all = parts + (lane == 0 ? 2 : 0);
                    auto& to = wires[lane].flying;
                    for (std::uint32_t i = 0; i < parts; ++i) {
                        to.push_back({begun, pack_group(Kind::part, id, all)});
                    }
                    if (lane == 0) {
                        to.push_back({begun, pack_group(Kind::signal, id,
                                                        static_cast<std::uint32_t>(begun))});
                        to.push_back(
                            {begun, pack_group(Kind::value, id,
                                               static_cast<std::uint32_t>(begun % 7 + 1))});
                    }
                    flying[begun] += all;
                }
                ++begun;
                break;
            case 1: {  // a message ends its way
                Wire& wire = wires[random() % lanes];
                if (wire.flying.empty() || wire.queue.size() == kReceives) break;
                const std::size_t at = ordered ? 0 : random() % wire.flying.size();
                const Message message = wire.flying[at];
                wire.flying.erase(wire.flying.begin() + static_cast<std::ptrdiff_t>(at));
                wire.queue.push_back(message);
                if (--flying[message.group] == 0) flying.erase(message.group);
                break;
            }
            default: {  // the receiver looks
                if (random() % 400 == 0) favourite = static_cast<std::uint32_t>(random() % lanes);
                const std::uint32_t lane =
                    wires[favourite].queue.empty() && (begun == groups || random() % 64 == 0)
                        ? static_cast<std::uint32_t>(random() % lanes)
                        : favourite;
                auto& queue = wires[lane].queue;
                if (queue.empty()) break;
                const Message message = queue.front();
                queue.pop_front();
                latest[lane] = std::max(latest[lane], message.group);
                for (const std::uint64_t other : latest) {
                    if (latest[lane] > other) ahead = std::max(ahead, latest[lane] - other);
                }
                Arrivals::Signal signal;
                switch (arrivals.take(lane, message.immediate, signal)) {
                    case Arrivals::Outcome::broken:
                        throw std::runtime_error("a lawful sender is called a liar");
                    case Arrivals::Outcome::pending:
                        break;
                    case Arrivals::Outcome::complete:
                        if (signal.signal >= groups || signal.value != signal.signal % 7 + 1) {
                            throw std::runtime_error("another signal is raised");
                        }
                        ++raised[signal.signal];
                        CHECK(!flying.contains(signal.signal));
                }
            }
        }
    }
    for (const std::uint32_t times : raised) CHECK(times == 1);
    if (lanes > 1) CHECK(ahead > verbs::kGroups / 2);  // the model does go to the edge
}

TEST(every_group_is_raised_once_when_all_of_it_has_come) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        for (const std::uint32_t lanes : {1u, 2u, 5u}) {
            play(lanes, false, 3000, seed);
            play(lanes, true, 3000, seed);
        }
    }
}

// The number of a request is found again from its low 37 bits, on either side of their edge.
TEST(request_numbers_go_over_the_edge_of_their_bits) {
    constexpr std::uint64_t kEdge = std::uint64_t{1} << 37;
    for (const std::uint64_t base : {std::uint64_t{0}, kEdge, 5 * kEdge}) {
        for (std::uint64_t number = base + kEdge - 4; number != base + kEdge + 4; ++number) {
            const std::uint64_t id = verbs::make_wr_id(false, verbs::kMaxPeers - 1, 63, number);
            CHECK(!verbs::wr_receive(id) && verbs::wr_peer(id) == verbs::kMaxPeers - 1);
            CHECK(verbs::wr_lane(id) == 63);
            for (const std::uint64_t later : {0u, 1u, 9u, 4096u}) {
                CHECK(verbs::wr_number(id, number + later) == number);
            }
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv);
}
