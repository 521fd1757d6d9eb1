// Fuzzes what puts groups of messages together again: streams of immediates as a sender makes them,
// in any order, then with one or more of them lost, doubled, changed or made up.
// Usage: fuzz_immediates CORPUS [seconds [seed]]
//
// Sound streams raise each group's signal once; where one message is lost, its group alone is not
// raised. Of what no device and no rank makes, only this: there are never more signals than shares on
// every lane, and each is one that a pad can have. Returns 0 where that held; else prints the stream
// and the seed.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "backends/nics/verbs/arrivals.hpp"
#include "backends/transport/signal_pad.hpp"

using namespace mkernel::nics::verbs;

namespace {

using Random = std::mt19937_64;
using Outcome = Arrivals::Outcome;

constexpr std::uint32_t kReceives = 48;

struct Message {
    std::uint32_t lane = 0;
    std::uint32_t immediate = 0;
};
using Stream = std::vector<Message>;

enum class Damage { none, lost, any };

std::string text(std::uint32_t lanes, const Stream& stream) {
    std::ostringstream out;
    out << lanes << " lanes" << std::hex;
    for (const Message& m : stream) out << ' ' << m.lane << ':' << m.immediate;
    return out.str();
}

const char* name(Outcome outcome) {
    return outcome == Outcome::pending    ? "pending"
           : outcome == Outcome::complete ? "complete"
                                          : "broken";
}

// A line of the corpus: what is wrong, or nothing.
std::optional<std::string> replay(const std::string& line) {
    std::istringstream in(line);
    std::uint32_t lanes = 0;
    std::string expected;
    in >> lanes >> expected >> std::hex;
    Arrivals arrivals(lanes, kReceives);
    std::string last;
    for (Message m; in >> m.lane && in.ignore() && in >> m.immediate;) {
        Arrivals::Signal signal;
        last = name(arrivals.take(m.lane, m.immediate, signal));
    }
    if (last == expected) return std::nullopt;
    return line + " is " + (last.empty() ? "nothing" : last);
}

// Every group is its own signal, and fewer groups than there are numbers: each number is one group.
Stream sound(std::uint32_t lanes, std::uint32_t groups, Random& random) {
    Stream stream;
    for (std::uint32_t group = 0; group < groups; ++group) {
        for (std::uint32_t lane = 0; lane < lanes; ++lane) {
            const auto parts = static_cast<std::uint32_t>(1 + random() % 3);
            const std::uint32_t all = parts + (lane == 0 ? 2 : 0);
            for (std::uint32_t i = 0; i < parts; ++i) {
                stream.push_back({lane, pack_group(Kind::part, group, all)});
            }
            if (lane != 0) continue;
            stream.push_back({lane, pack_group(Kind::signal, group, group)});
            stream.push_back({lane, pack_group(Kind::value, group, group + 1)});
        }
    }
    std::shuffle(stream.begin(), stream.end(), random);
    return stream;
}

void spoil(Stream& stream, std::uint32_t lanes, Random& random) {
    for (auto times = 1 + random() % 4; times > 0; --times) {
        Message& m = stream[random() % stream.size()];
        switch (random() % 5) {
            case 0:
                stream.push_back(m);
                break;
            case 1:
                m.immediate ^= 1u << random() % 31;
                break;
            case 2:
                m.lane = static_cast<std::uint32_t>(random() % lanes);
                break;
            case 3:
                m.immediate = stream[random() % stream.size()].immediate;
                break;
            default:
                m.immediate = 1u << 31 | static_cast<std::uint32_t>(random());
        }
    }
}

// One stream: what is wrong, or nothing.
std::optional<std::string> play(Damage damage, Random& random) {
    const auto lanes = static_cast<std::uint32_t>(1 + random() % 4);
    const auto groups = static_cast<std::uint32_t>(1 + random() % kGroups);
    Stream stream = sound(lanes, groups, random);
    std::uint32_t victim = groups;  // none
    if (damage == Damage::lost) {
        const auto at = static_cast<std::ptrdiff_t>(random() % stream.size());
        victim = group_of(stream[static_cast<std::size_t>(at)].immediate);
        stream.erase(stream.begin() + at);
    } else if (damage == Damage::any) {
        spoil(stream, lanes, random);
    }
    Arrivals arrivals(lanes, kReceives);
    std::map<std::uint32_t, std::uint32_t> raised;
    std::uint64_t complete = 0;
    for (const Message& m : stream) {
        Arrivals::Signal signal;
        const Outcome outcome = arrivals.take(m.lane, m.immediate, signal);
        if (outcome == Outcome::broken) {
            if (damage != Damage::any) {
                return "a sound sender is refused: " + text(lanes, stream);
            }
            break;  // the NIC fails
        }
        if (outcome != Outcome::complete) continue;
        ++complete;
        ++raised[signal.signal];
        if (signal.signal > kMaxSignal || signal.value > kMaxValue) {
            return "a signal that no pad has: " + text(lanes, stream);
        }
        if (damage != Damage::any && signal.value != signal.signal + 1) {
            return "another group's value: " + text(lanes, stream);
        }
    }
    if (complete * lanes > stream.size()) return "too many signals: " + text(lanes, stream);
    if (damage == Damage::any) return std::nullopt;
    for (const auto& [signal, times] : raised) {
        if (times != 1 || signal >= groups || signal == victim) {
            return "a signal is raised that should not be: " + text(lanes, stream);
        }
    }
    const std::size_t wanted = groups - (victim < groups ? 1 : 0);
    if (raised.size() != wanted) return "a signal is lost: " + text(lanes, stream);
    return std::nullopt;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::cerr << "usage: fuzz_immediates CORPUS [streams [seed]]\n", 2;
    const std::uint64_t others = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 100'000;
    const std::uint64_t seed =
        argc > 3 ? std::strtoull(argv[3], nullptr, 10) : std::random_device{}();
    std::ifstream corpus(argv[1]);
    std::uint64_t lines = 0;
    for (std::string line; std::getline(corpus, line);) {
        if (line.empty() || line[0] == '#') continue;
        ++lines;
        if (const auto wrong = replay(line)) return std::cout << *wrong << '\n', 1;
    }
    if (lines == 0) return std::cerr << "no corpus at " << argv[1] << '\n', 2;
    Random random(seed);
    for (std::uint64_t stream = 0; stream < others; ++stream) {
        if (const auto wrong = play(static_cast<Damage>(stream % 3), random)) {
            return std::cout << *wrong << "; seed " << seed << '\n', 1;
        }
    }
    std::cout << lines << " known streams, " << others << " others; seed " << seed << '\n';
    return 0;
}
