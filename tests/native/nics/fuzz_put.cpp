// Fuzzes what decodes commands: the FIFO's slots, and the NIC's look at a command before it touches
// memory. Seeded mutations of a corpus; no coverage feedback, so it runs with any compiler.
// Usage: fuzz_put LIBRARY CORPUS cx7|efa [seconds [seed]]
//
// Slots: whatever lies in a ring, pop gives exactly the commands that were pushed, in order.
// Commands: what an oracle of our own, in 128-bit numbers, calls sound arrives with its bytes and
// its signal and changes nothing else at the peer; everything else fails with INVALID_PUT and
// changes nothing at all. Returns 0 where that held; else prints the command and the seed.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <vector>

#include "pair.hpp"
#include "setting.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

using Random = std::mt19937_64;
using Wide = unsigned __int128;

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kGuard = 4096;  // on each side of every region
constexpr std::uint32_t kRegions = 3;
constexpr std::uint32_t kUnbound = 2;  // registered on both sides, not bound
constexpr std::array<std::uint64_t, kRegions> kHere = {65536, 8192, 4096};
constexpr std::array<std::uint64_t, kRegions> kThere = {65536, 4096, 4096};
constexpr std::uint32_t kPadSignals = testing::kSignals;

std::string text(const transport::PutCommand& c) {
    std::ostringstream out;
    out << std::hex << c.local_offset << ' ' << c.remote_offset << ' ' << c.bytes << ' ' << c.peer
        << ' ' << c.region << ' ' << c.signal << ' ' << c.value;
    return out.str();
}

bool same(const transport::PutCommand& a, const transport::PutCommand& b) {
    return text(a) == text(b);
}

std::vector<transport::PutCommand> read_corpus(const char* path) {
    std::ifstream file(path);
    std::vector<transport::PutCommand> all;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream in(line);
        transport::PutCommand c;
        in >> std::hex >> c.local_offset >> c.remote_offset >> c.bytes >> c.peer >> c.region >>
            c.signal >> c.value;
        if (!in) throw std::runtime_error("not a command: " + line);
        all.push_back(c);
    }
    if (all.empty()) throw std::runtime_error(std::string("no corpus at ") + path);
    return all;
}

std::uint64_t mutated(std::uint64_t v, Random& random) {
    static constexpr std::uint64_t kEdges[] = {0,          1,           8,
                                               255,        256,         0xff0,
                                               0xff1,      1023,        1024,
                                               4095,       4096,        4097,
                                               8192,       65535,       65536,
                                               65537,      1u << 24,    (1u << 24) - 1,
                                               0x7fffffff, 0xffffffff,  0x100000000u,
                                               ~0ull >> 1, ~0ull << 63, ~0ull};
    switch (random() % 5) {
        case 0:
            return kEdges[random() % std::size(kEdges)];
        case 1:
            return v + random() % 17 - 8;
        case 2:
            return v ^ (1ull << random() % 64);
        case 3:
            return random() >> random() % 64;
        default:
            return kEdges[random() % std::size(kEdges)] - v;
    }
}

transport::PutCommand mutated(transport::PutCommand c, Random& random) {
    for (auto n = 1 + random() % 2; n > 0; --n) {
        switch (random() % 9) {
            case 0:
            case 1:
                c.local_offset = mutated(c.local_offset, random);
                break;
            case 2:
            case 3:
                c.remote_offset = mutated(c.remote_offset, random);
                break;
            case 4:
            case 5:
                c.bytes = mutated(c.bytes, random);
                break;
            case 6:
                c.signal = static_cast<std::uint32_t>(mutated(c.signal, random));
                break;
            case 7:
                c.value = static_cast<std::uint32_t>(mutated(c.value, random));
                break;
            default:
                (random() % 2 != 0 ? c.peer : c.region) =
                    static_cast<std::uint32_t>(mutated(c.peer, random));
        }
    }
    return c;
}

// Whether the NIC must take it.
bool sound(const transport::PutCommand& c, const Capabilities& nic) {
    if (c.peer != 1) return false;
    if (c.signal != transport::PutCommand::kNoSignal &&
        (c.signal > nic.max_signal || c.value > nic.max_value)) {
        return false;
    }
    if (c.bytes == 0) return true;
    return c.region < kRegions && c.region != kUnbound &&
           Wide{c.local_offset} + c.bytes <= kHere[c.region] &&
           Wide{c.remote_offset} + c.bytes <= kThere[c.region];
}

bool signals(const transport::PutCommand& c) {
    return c.signal != transport::PutCommand::kNoSignal && c.value != 0;
}

// Its signal is one that the peer's pad does not have.
bool goes_beyond(const transport::PutCommand& c) {
    return signals(c) && c.signal >= kPadSignals;
}

struct Sink final : SignalSink {
    bool raise(std::uint32_t, std::uint32_t signal, std::uint64_t value) override {
        if (signal >= kPadSignals) return false;
        if (bytes != 0 && std::memcmp(there, here, bytes) != 0) early = true;
        raised += value;
        last = signal;
        return true;
    }
    std::uint64_t raised = 0;
    std::uint32_t last = 0;
    // What must be there before any signal is.
    const std::byte* here = nullptr;
    const std::byte* there = nullptr;
    std::uint64_t bytes = 0;
    bool early = false;
};

// The rails of two lanes.
constexpr std::array<std::uint32_t, 2> kLanes{0, 0};

// With puts from 4 KiB on spread over two lanes.
std::unique_ptr<Nic> open(const std::string& nic, const std::string& library) {
    if (nic != "cx7" && nic != "efa") throw std::runtime_error("no NIC " + nic + "; cx7 or efa");
    testing::Setup setup;
    setup.srd = nic == "efa";
    setup.options.stripe_bytes = 4096;
    return setup.nic(library);
}

// Two NICs, driven by this thread in place of their proxies. All regions of a side lie in one
// buffer with guards between them.
class World {
  public:
    World(const std::string& nic, const std::string& library)
        : from_owner_(open(nic, library)),
          to_owner_(open(nic, library)),
          limits_(from_.capabilities()),
          source_(kBytes),
          target_(kBytes),
          expected_(kBytes) {
        const auto here = from_.add_peer(1, kLanes);
        const auto there = to_.add_peer(0, kLanes);
        from_.connect(1, there);
        to_.connect(0, here);
        std::uint64_t at = kGuard;
        for (std::uint32_t r = 0; r < kRegions; ++r) {
            at_[r] = at;
            from_.register_memory(r, {source_.address() + at, kHere[r]});
            const RemoteKey key = to_.register_memory(r, {target_.address() + at, kThere[r]});
            if (r != kUnbound) from_.bind(r, 1, key);
            at += kHere[r] + kGuard;
        }
        for (std::size_t i = 0; i < kBytes; ++i) {
            source_.data()[i] = static_cast<std::byte>(i * 131 >> 3);
            target_.data()[i] = expected_[i] = std::byte{0xcc};
        }
    }

    const Capabilities& limits() const { return limits_; }

    // What is wrong, or nothing. `broken`: the world is used up.
    std::optional<std::string> put(const transport::PutCommand& c, bool& broken) {
        PutCursor cursor;
        Sink sink;
        Sink none;
        if (sound(c, limits_) && c.bytes != 0) {
            sink.here = source_.data() + at_[c.region] + c.local_offset;
            std::byte* there = target_.data() + at_[c.region] + c.remote_offset;
            std::transform(sink.here, sink.here + c.bytes, there, [](std::byte b) { return ~b; });
            sink.there = there;
            sink.bytes = c.bytes;
        }
        const std::uint64_t deadline = monotonic_ns() + 30 * kSecond;
        PutResult result = from_.put(c, cursor);
        while (result == PutResult::busy) {
            from_.ring();
            from_.poll(none);
            to_.poll(sink);
            if (monotonic_ns() > deadline) return "the queue stays full";
            result = from_.put(c, cursor);
        }
        broken = result == PutResult::failed;
        if (sound(c, limits_) == broken) return broken ? "refused" : "taken";
        if (broken) {
            const auto failure = from_.failure();
            if (failure->status != "INVALID_PUT") return "failed otherwise";
            if (failure->peer != c.peer) return "failed, and names another peer";
            return compare();
        }
        from_.ring();
        from_.mark(0);
        const bool beyond = goes_beyond(c);
        const std::uint64_t wanted = signals(c) && !beyond ? c.value : 0;
        while (!from_.reached_mark(0) || sink.raised < wanted || (beyond && !to_.failed())) {
            from_.poll(none);
            to_.poll(sink);
            if (from_.failed() || (to_.failed() && !beyond)) return "failed on its way";
            if (monotonic_ns() > deadline) return "does not arrive";
        }
        if (beyond && to_.failure()->status != "INVALID_PUT") return "the peer failed otherwise";
        broken = beyond;
        if (sink.early) return "raises its signal before its bytes are there";
        if (sink.raised != wanted || none.raised != 0) return "raises another value";
        if (wanted != 0 && sink.last != c.signal) return "raises another signal";
        if (c.bytes != 0) {
            std::memcpy(expected_.data() + (sink.there - target_.data()), sink.here, c.bytes);
        }
        return compare();
    }

  private:
    static constexpr std::size_t kBytes = kHere[0] + kHere[1] + kHere[2] + (kRegions + 1) * kGuard;

    std::optional<std::string> compare() const {
        if (std::memcmp(expected_.data(), target_.data(), kBytes) == 0) return std::nullopt;
        return "leaves other bytes at the peer";
    }

    std::unique_ptr<Nic> from_owner_;
    std::unique_ptr<Nic> to_owner_;
    Nic& from_ = *from_owner_;
    Nic& to_ = *to_owner_;
    Capabilities limits_;
    testing::Memory source_;
    testing::Memory target_;
    std::vector<std::byte> expected_;
    std::array<std::uint64_t, kRegions> at_{};
};

// A ring whose slots hold any bytes, except the one commit word that says "fresh".
std::optional<std::string> fuzz_ring(const std::vector<transport::PutCommand>& corpus,
                                     Random& random) {
    transport::Fifo fifo(1ull << random() % 5);
    const transport::FifoHandle& handle = fifo.handle();
    const testing::Memory memory(SignalPad::bytes(1));
    const SignalPad pad = SignalPad::format(memory.data(), 1);
    std::vector<transport::PutCommand> queued;
    for (int step = 0; step < 64; ++step) {
        const std::uint64_t ticket = fifo.pushed();
        transport::FifoSlot& slot = handle.slots[ticket & (handle.capacity - 1)];
        if (fifo.depth() < handle.capacity) {
            for (std::uint64_t& word : slot.reserved) word = random();
            slot.command = mutated(corpus[random() % corpus.size()], random);
            const std::uint64_t fresh = transport::FifoSlot::commit_word(ticket, handle.capacity);
            slot.commit = mutated(fresh, random);
            if (slot.commit == fresh) slot.commit ^= transport::FifoSlot::kCommitBit;
        }
        transport::PutCommand got;
        if (queued.empty() && (fifo.ready() || fifo.host().pop(got)))
            return "pop gives what nobody pushed";
        if (fifo.depth() < handle.capacity && random() % 3 != 0) {
            queued.push_back(mutated(corpus[random() % corpus.size()], random));
            if (handle.push(queued.back(), pad, monotonic_ns() + kSecond, {}) != WaitResult::ok) {
                return "push fails in a ring with room";
            }
        } else if (!queued.empty()) {
            if (!fifo.host().pop(got)) return "a command is lost";
            if (!same(got, queued.front())) return "a command is changed";
            queued.erase(queued.begin());
            fifo.release();
        }
    }
    return std::nullopt;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4)
        return std::cerr << "usage: fuzz_put LIBRARY CORPUS cx7|efa [mutations [seed]]\n", 2;
    const auto corpus = read_corpus(argv[2]);
    const std::uint64_t mutations = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 1000;
    const std::uint64_t seed =
        argc > 5 ? std::strtoull(argv[5], nullptr, 10) : std::random_device{}();
    Random random(seed);
    std::uint64_t taken = 0;
    std::uint64_t refused = 0;
    std::optional<World> world;
    // The corpus itself first.
    for (std::uint64_t n = 0; taken + refused < corpus.size() + mutations; ++n) {
        if (!world) {
            // Some worlds cut puts into many messages.
            static constexpr const char* kMessages[] = {"100", "4096", "1048576"};
            const testing::Setting message("MKERNEL_SOFTVERBS_MAX_MESSAGE",
                                           kMessages[random() % 3]);
            world.emplace(argv[3], argv[1]);
        }
        transport::PutCommand c = corpus[n < corpus.size() ? n : random() % corpus.size()];
        if (n >= corpus.size()) c = mutated(c, random);
        // A failure costs a new pair of NICs: most of the time goes to what is taken.
        const bool fails = !sound(c, world->limits()) || goes_beyond(c);
        if (n >= corpus.size() && fails && random() % 256 != 0) continue;
        bool broken = false;
        auto wrong = world->put(c, broken);
        if (wrong) wrong = "the command " + text(c) + " " + *wrong;
        if (!wrong) wrong = fuzz_ring(corpus, random);
        if (wrong) return std::cout << *wrong << "; seed " << seed << '\n', 1;
        (broken ? refused : taken) += 1;
        if (broken) world.reset();
    }
    std::cout << taken << " commands taken, " << refused << " refused; seed " << seed << '\n';
    return 0;
}
