// Sessions with everything running: producers, proxies, engines, waiters and observers at once, in
// one process, so that a race detector sees both ends. Usage: test_session LIBRARY [test]
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pair.hpp"

using namespace mkernel::nics;
using mkernel::runtime::AbortCode;
using mkernel::runtime::WaitResult;

namespace {

std::string library;

struct Couple {
    explicit Couple(std::size_t bytes, const testing::Setup& setup = {.slots = 64})
        : one(library, 1, bytes, setup), other(library, 0, bytes, setup) {
        one.join(other.endpoints, other.key);
        other.join(one.endpoints, one.key);
    }
    testing::Rank one;
    testing::Rank other;
};

constexpr std::size_t kCell = 256;

// Four producers a side, both directions, a ring that laps often; somebody flushes and somebody
// reads the statistics meanwhile. Every waiter checks the bytes that its signal promises.
void both_directions_with_everybody_at_work() {
    constexpr std::uint32_t kProducers = 4;
    constexpr std::uint32_t kPuts = 200;
    Couple pair(2 * kProducers * kPuts * kCell);
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
void a_broken_path_ends_every_push() {
    Couple pair(1 << 16, {.slots = 4});
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

// Memory is registered and bound while the proxy moves bytes of another region.
void registration_beside_traffic() {
    Couple pair(1 << 20);
    const testing::Memory here(1 << 16);
    const testing::Memory there(1 << 16);
    std::thread producer([&] {
        for (int i = 0; i < 300; ++i) {
            CHECK(pair.one.put(2048, 2) == WaitResult::ok);
        }
    });
    for (std::uint32_t region = 1; region <= 32; ++region) {
        pair.one.session.nic().register_memory(region, {here.address(), here.bytes()});
        const RemoteKey key =
            pair.other.session.nic().register_memory(region, {there.address(), there.bytes()});
        pair.one.session.nic().bind(region, 1, key);
        PutCommand c;
        std::memset(here.data(), static_cast<int>(region), 4096);
        c.bytes = 4096;
        c.remote_offset = 8192;
        c.peer = 1;
        c.region = region;
        c.signal = 3;
        c.value = 1;
        CHECK(pair.one.session.put(c, 10) == WaitResult::ok);
        CHECK(pair.other.wait(3, region, 10));
        CHECK(there.data()[8192] == static_cast<std::byte>(region));
    }
    producer.join();
    CHECK(pair.other.wait(2, 300, 10));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::fprintf(stderr, "usage: test_session LIBRARY [test]\n"), 2;
    library = argv[1];
    return testing::run(
        {{"both_directions_with_everybody_at_work", both_directions_with_everybody_at_work},
         {"a_broken_path_ends_every_push", a_broken_path_ends_every_push},
         {"registration_beside_traffic", registration_beside_traffic}},
        argc > 2 ? argv[2] : nullptr);
}
