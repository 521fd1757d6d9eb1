// Sessions of both kinds of queue pair over several rails and queue pairs, with producers, proxies,
// engines and observers at work. A rail here is another opening of the one software device.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pair.hpp"
#include "setting.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::nics::testing::library;
using mkernel::transport::AbortCode;
using mkernel::transport::monotonic_ns;
using mkernel::transport::WaitResult;

namespace {

constexpr std::size_t kBytes = 1 << 20;

testing::Setup setup(bool srd, std::size_t rails, std::uint32_t qps) {
    testing::Setup made;
    made.srd = srd;
    made.ports.assign(rails, {"soft0"});
    made.qps = qps;
    made.options.stripe_bytes = 4096;
    return made;
}

void fill(testing::Rank& rank, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    auto* words = reinterpret_cast<std::uint64_t*>(rank.memory.data());
    for (std::size_t i = 0; i < kBytes / sizeof(*words); ++i) words[i] = random();
}

// No byte of the other rank's is what a put would bring.
void fill_unlike(testing::Couple& pair, std::uint64_t seed) {
    fill(pair.one, seed);
    for (std::size_t i = 0; i < kBytes; ++i) {
        pair.other.memory.data()[i] = ~pair.one.memory.data()[i];
    }
}

// So many bytes are there, and not the one behind them.
void check_whole(const testing::Couple& pair, std::uint64_t at, std::uint64_t bytes) {
    const auto* sent = pair.one.memory.data() + at;
    const auto* came = pair.other.memory.data() + at;
    CHECK(std::memcmp(sent, came, bytes) == 0);
    CHECK(came[bytes] != sent[bytes]);
}

// Puts of all sizes, one signal each; every signal promises its own bytes, whatever else is under
// way on other lanes.
void puts_arrive_whole(const testing::Setup& here, const testing::Setup& there) {
    constexpr std::uint64_t kSlots = 12;
    constexpr std::uint64_t kSlot = kBytes / kSlots / 64 * 64;
    testing::Couple pair(library, kBytes, here, there);
    std::mt19937_64 random(7);
    for (std::uint64_t round = 1; round <= 12; ++round) {
        fill_unlike(pair, round);
        std::array<std::uint64_t, kSlots> size{};
        for (std::uint32_t i = 0; i < kSlots; ++i) {
            size[i] = random() % (random() % 3 == 0 ? kSlot : 9000);
            CHECK(pair.one.put(size[i], i, 3, i * kSlot, i * kSlot) == WaitResult::ok);
        }
        for (std::uint32_t i = 0; i < kSlots; ++i) {
            CHECK(pair.other.wait(i, 3 * round));
            check_whole(pair, i * kSlot, size[i]);
        }
        CHECK(pair.one.session.flush(10));
    }
    for (std::uint32_t i = 0; i < kSlots; ++i) CHECK(pair.other.pad.load(i) == 36);
}

TEST(puts_arrive_whole_over_every_shape) {
    for (const bool srd : {false, true}) {
        for (const auto& [rails, qps] : {std::pair{1u, 1u}, {1u, 4u}, {2u, 1u}, {3u, 2u}}) {
            const auto both = setup(srd, rails, qps);
            puts_arrive_whole(both, both);
        }
    }
}

// What connecting two ends says that cannot be connected; empty: it did.
std::string refusal(const testing::Setup& here, const testing::Setup& there) {
    try {
        testing::Couple(library, kBytes, here, there);
    } catch (const SetupError& error) {
        return error.what();
    }
    return {};
}

// What goes to a peer is bounded by the receives that it has told of.
TEST(rails_that_cannot_be_told_how_often_to_retry_carry_all_the_same) {
    const testing::Setting without("MKERNEL_SOFTVERBS_RNR_RETRY", "0");
    const auto both = setup(true, 2, 2);
    puts_arrive_whole(both, both);
}

TEST(ends_of_unlike_shapes_are_refused) {
    for (const bool srd : {false, true}) {
        CHECK(refusal(setup(srd, 1, 4), setup(srd, 2, 1)) ==
              "peer 1 made 2 queue pairs for this rank, which made 4 for it; both must follow one "
              "plan");
        CHECK(refusal(setup(srd, 1, 1), setup(srd, 1, 2)).find("made 2") != std::string::npos);
    }
}

TEST(lanes_that_cannot_be_are_refused) {
    const auto nic = setup(false, 2, 1).nic(library);
    const auto refused = [&](const std::vector<std::uint32_t>& rails) -> std::string {
        try {
            nic->add_peer(0, rails);
        } catch (const SetupError& error) {
            return error.what();
        }
        return {};
    };
    CHECK(refused({}).find("0 queue pairs; use 1 to 64") != std::string::npos);
    CHECK(refused(std::vector<std::uint32_t>(65)).find("65 queue pairs") != std::string::npos);
    CHECK(refused({0, 1, 2}).find("on rail 2 of 2") != std::string::npos);
    CHECK(refused({1, 0, 1}).empty());
    CHECK(nic->lanes().size() == 3 && nic->lanes()[0].rail == 1 && nic->lanes()[2].lane == 2);
}

// Small puts go round the lanes, large ones lie on all: the lanes' own counters say so, also when
// the session is closed.
TEST(lanes_carry_their_turns_and_their_shares) {
    for (const bool srd : {false, true}) {
        const auto both = setup(srd, 2, 2);
        testing::Couple pair(library, kBytes, both);
        // Apart from each other: each rail's thread of the software device writes its own.
        for (std::uint32_t i = 0; i < 6; ++i) {
            CHECK(pair.one.put(100, 0, 1, i * 128, i * 128) == WaitResult::ok);
        }
        CHECK(pair.one.put(8192, 0, 1, 1024, 1024) == WaitResult::ok);
        CHECK(pair.other.wait(0, 7));
        CHECK(pair.one.session.flush(10));
        pair.one.session.close();
        const auto lanes = pair.one.session.lanes();
        CHECK(lanes.size() == 4);
        for (const LaneCounts& lane : lanes) {
            CHECK(lane.peer == 1);
            CHECK(lane.rail == lane.lane % 2);
            const std::uint64_t turns = lane.lane < 2 ? 2 : 1;
            CHECK(lane.bytes == 100 * turns + 2048);
            // The first lane also brings the signal and the value of the large one.
            CHECK(lane.messages == turns + (lane.lane == 0 ? 3 : 1));
        }
        for (const LaneCounts& lane : pair.other.session.lanes()) CHECK(lane.bytes == 0);
    }
}

// Many more spread puts than there are group numbers, with and without room for them. On one rail,
// as in all tests whose puts overlap: then one thread of the software device writes them.
TEST(group_numbers_wrap) {
    for (const auto& [srd, depth] :
         {std::pair{false, 8u}, {false, 512u}, {true, 8u}, {true, 512u}}) {
        auto both = setup(srd, 1, 4);
        both.options.queue_depth = depth;
        testing::Couple pair(library, kBytes, both);
        fill(pair.one, 3);
        constexpr std::uint32_t kPuts = 1000;
        for (std::uint32_t i = 0; i < kPuts; ++i) {
            CHECK(pair.one.put(5000 + i, i % 2, 1, i, i) == WaitResult::ok);
        }
        CHECK(pair.other.wait(0, kPuts / 2, 30));
        CHECK(pair.other.wait(1, kPuts / 2, 30));
        CHECK(std::memcmp(pair.one.memory.data(), pair.other.memory.data(), 5000 + kPuts - 1) == 0);
        CHECK(pair.other.session.statistics().signals_raised == kPuts);
    }
}

TEST(only_one_lane_of_rc_claims_order) {
    const auto ordered = [](const testing::Setup& made) {
        const auto nic = made.nic(library);
        nic->add_peer(0, made.rails());
        return nic->capabilities().ordered;
    };
    CHECK(ordered(setup(false, 1, 1)));
    CHECK(!ordered(setup(false, 1, 2)));
    CHECK(!ordered(setup(false, 2, 1)));
    CHECK(!ordered(setup(true, 1, 1)));
}

// The receiver's proxy does not run for a while: the sender stops at what the receiver has posted,
// and nothing fails, though it is told to try but once where there is no receive.
TEST(a_receiver_that_does_not_look_is_never_overrun) {
    for (const bool srd : {false, true}) {
        for (const std::uint32_t qps : {1u, 2u}) {
            auto both = setup(srd, 1, qps);
            both.options.receive_depth = 16;
            both.options.rnr_retry = 1;
            testing::Rank one(library, 1, kBytes, both);
            testing::Rank other(library, 0, kBytes, both);
            one.connect(other.endpoints, other.key);
            other.connect(one.endpoints, one.key);
            one.start();
            constexpr std::uint32_t kPuts = 500;
            for (std::uint32_t i = 0; i < kPuts; ++i) CHECK(one.put(64, 5) == WaitResult::ok);
            const auto sent = [&] { return one.session.statistics().puts; };
            const std::uint64_t late = monotonic_ns() + 30'000'000'000u;
            while (sent() < 16 * qps && monotonic_ns() < late) std::this_thread::yield();
            ::usleep(150'000);  // many times what an RNR retry takes
            CHECK(!one.session.failure());
            CHECK(sent() == 16 * qps);
            other.start();
            CHECK(other.wait(5, kPuts));
            CHECK(one.session.flush(10));
            CHECK(!one.session.failure());
            CHECK(!other.session.failure());
        }
    }
}

// Both at once, each far ahead of what the other has looked at.
TEST(credits_flow_both_ways) {
    for (const bool srd : {false, true}) {
        auto both = setup(srd, 1, 2);
        both.options.receive_depth = 8;
        both.options.queue_depth = 4;
        testing::Couple pair(library, kBytes, both);
        constexpr std::uint32_t kPuts = 3000;
        std::thread back([&] {
            for (std::uint32_t i = 0; i < kPuts; ++i) CHECK(pair.other.put(0, 1) == WaitResult::ok);
        });
        for (std::uint32_t i = 0; i < kPuts; ++i) {
            CHECK(pair.one.put(i % 50 == 0 ? 6000 : 8, 1) == WaitResult::ok);
        }
        back.join();
        CHECK(pair.other.wait(1, kPuts, 30));
        CHECK(pair.one.wait(1, kPuts, 30));
    }
}

// A provider's queue that is smaller than what it was asked for: what it has no room for goes later, whole and once,
// though nothing is put behind it.
TEST(what_the_provider_has_no_room_for_goes_later) {
    const testing::Setting small("MKERNEL_SOFTVERBS_SRD_QUEUE", "40");
    const testing::Setting slow("MKERNEL_SOFTVERBS_LATENCY_NS", "200000000");
    testing::Rank one(library, 1, kBytes, setup(true, 1, 1));
    testing::Rank other(library, 0, kBytes, setup(true, 1, 1));
    one.connect(other.endpoints, other.key);
    other.join(one.endpoints, one.key);
    Nic& nic = one.session.nic();
    constexpr std::uint32_t kStaged = 64;  // two chains, of which one has room
    constexpr std::uint32_t kPuts = 96;    // the third is begun when the second is taken
    for (std::size_t i = 0; i < kBytes; ++i) {
        one.memory.data()[i] = static_cast<std::byte>(i * 7 + i / 64);
        other.memory.data()[i] = ~one.memory.data()[i];
    }
    transport::PutCommand c;
    c.peer = 1;
    c.bytes = 64;
    c.signal = 5;
    c.value = 1;
    struct Nothing final : SignalSink {
        bool raise(std::uint32_t, std::uint32_t, std::uint64_t) override { return true; }
    } sink;
    const std::uint64_t late = monotonic_ns() + 30'000'000'000u;
    const auto go_on = [&] {
        nic.ring();
        nic.poll(sink);
        return monotonic_ns() < late;
    };
    for (std::uint32_t i = 0; i < kPuts; ++i) {
        c.local_offset = c.remote_offset = i * c.bytes;
        PutCursor cursor;
        PutResult put = nic.put(c, cursor);
        CHECK(i >= kStaged || put == PutResult::done);
        while (put == PutResult::busy && go_on()) put = nic.put(c, cursor);
        CHECK(put == PutResult::done);
    }
    while (other.pad.load(5) < kPuts && go_on()) {
    }
    CHECK(other.pad.load(5) == kPuts);
    CHECK(std::memcmp(one.memory.data(), other.memory.data(), kPuts * c.bytes) == 0);
    CHECK(!nic.failure());
}

// On a NIC without order a request that is late keeps its own place in the queue, and nobody else's.
TEST(a_late_request_holds_up_none_behind_it) {
    constexpr std::uint32_t kPuts = 180;  // a quarter of them is late, by up to a second
    const testing::Setting hold("MKERNEL_SOFTVERBS_HOLD_NS", "1000000000");
    const testing::Setting twice("MKERNEL_SOFTVERBS_DUPLICATES", "0");
    testing::Setup made = setup(true, 1, 1);
    made.options.queue_depth = 64;
    testing::Couple pair(library, kBytes, made);
    const std::uint64_t start = monotonic_ns();
    for (std::uint32_t i = 0; i < kPuts; ++i) CHECK(pair.one.put(8, i) == WaitResult::ok);
    while (pair.one.session.statistics().puts < kPuts && monotonic_ns() - start < 10'000'000'000) {
        std::this_thread::yield();
    }
    CHECK(monotonic_ns() - start < 700'000'000);
    for (std::uint32_t i = 0; i < kPuts; ++i) CHECK(pair.other.wait(i, 1));
    CHECK(pair.one.session.flush(10));
}

// One of several lanes breaks: the failure names it, and both ends learn of it.
TEST(a_broken_lane_is_a_failure_of_the_peer) {
    for (const bool srd : {false, true}) {
        const auto both = setup(srd, 1, 4);
        testing::Couple pair(library, kBytes, both);
        pair.one.session.nic().inject_failure(1);
        while (pair.one.put(8192, 1) == WaitResult::ok) {
        }
        CHECK(pair.one.pad.aborted() == AbortCode::nic_error);
        const auto failure = pair.one.session.failure();
        CHECK(failure && failure->peer == 1);
        CHECK(failure && failure->qp == pair.one.endpoints[0].qp_num);
        CHECK(failure && failure->status == "WR_FLUSH_ERR");
        CHECK(failure && failure->message.find("soft0") != std::string::npos);
    }
}

// ---- everything running at once: a race detector sees both ends in this process

constexpr std::size_t kCell = 256;

// Four producers a side, both directions, a ring that laps often; somebody flushes and somebody
// reads the statistics meanwhile. Every waiter checks the bytes that its signal promises.
TEST(both_directions_with_everybody_at_work) {
    constexpr std::uint32_t kProducers = 4;
    constexpr std::uint32_t kPuts = 200;
    testing::Couple pair(library, 2 * kProducers * kPuts * kCell, {.slots = 64});
    std::atomic<int> wrong{0};
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    const auto produce = [&](testing::Rank& from, testing::Rank& to, std::uint32_t p) {
        // The lower half of a buffer is sent, the upper half received.
        const std::uint64_t half = std::uint64_t{kProducers} * kPuts * kCell;
        for (std::uint32_t i = 0; i < kPuts; ++i) {
            const std::uint64_t at = (std::uint64_t{p} * kPuts + i) * kCell;
            std::memset(from.memory.data() + at, static_cast<int>(p * 31 + i + 1), kCell);
            if (from.put(kCell, p, 1, at, half + at) != WaitResult::ok) ++wrong;
        }
        if (!to.wait(p, kPuts, 30)) ++wrong;
        for (std::uint32_t i = 0; i < kPuts; ++i) {
            const std::uint64_t at = half + (std::uint64_t{p} * kPuts + i) * kCell;
            const auto want = static_cast<std::byte>(p * 31 + i + 1);
            if (to.memory.data()[at] != want || to.memory.data()[at + kCell - 1] != want) ++wrong;
        }
    };
    for (std::uint32_t p = 0; p < kProducers; ++p) {
        threads.emplace_back([&, p] { produce(pair.one, pair.other, p); });
        threads.emplace_back([&, p] { produce(pair.other, pair.one, p); });
    }
    std::thread observer([&] {
        while (!over) {
            if (!pair.one.session.flush(30)) ++wrong;
            if (pair.other.session.statistics().puts > kProducers * kPuts) ++wrong;
            if (pair.other.session.failure()) ++wrong;
        }
    });
    for (auto& each : threads) each.join();
    over = true;
    observer.join();
    CHECK(wrong == 0);
    for (testing::Rank* rank : {&pair.one, &pair.other}) {
        CHECK(rank->session.flush(10));
        const ProxyStatistics seen = rank->session.statistics();
        CHECK(seen.puts == kProducers * kPuts);
        CHECK(seen.put_bytes == kProducers * kPuts * kCell);
        CHECK(seen.signals_raised == kProducers * kPuts);
        CHECK(seen.queue_depth == 0);
    }
}

// The path breaks while producers push: all of them come back, the pad says why, close works.
TEST(a_broken_path_ends_every_push) {
    testing::Couple pair(library, 1 << 16, {.slots = 4});
    std::vector<std::thread> producers;
    std::atomic<int> ended{0};
    for (int p = 0; p < 3; ++p) {
        producers.emplace_back([&] {
            while (pair.one.put(512, 1) == WaitResult::ok) {
            }
            ++ended;
        });
    }
    CHECK(pair.other.wait(1, 50, 30));
    pair.one.session.nic().inject_failure(1);
    for (auto& each : producers) each.join();
    CHECK(ended == 3);
    CHECK(pair.one.pad.aborted() == AbortCode::nic_error);
    CHECK(pair.one.session.failure().has_value());
    CHECK(!pair.one.session.flush(1));
    pair.one.session.close();
    pair.one.session.close();
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
