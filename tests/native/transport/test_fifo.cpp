// The command FIFO: order, laps, producers in parallel, back-pressure, deadlines and aborts.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "backends/transport/fifo.hpp"
#include "tests/native/nics/check.hpp"
#include "tests/native/nics/pair.hpp"

using namespace mkernel;
using mkernel::transport::AbortCode;
using mkernel::transport::Diagnosis;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

struct Bench {
    explicit Bench(std::uint64_t slots)
        : fifo(slots), memory(SignalPad::bytes(8)), pad(SignalPad::format(memory.data(), 8)) {}
    WaitResult push(std::uint64_t tag, std::uint32_t producer = 0, double seconds = 30) {
        transport::PutCommand c;
        c.bytes = tag;
        c.peer = producer;
        c.local_offset = tag * 3;
        c.remote_offset = ~tag;
        return fifo.handle().push(c, pad,
                                  monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9), {});
    }
    transport::Fifo fifo;
    nics::testing::Memory memory;
    SignalPad pad;
};

bool whole(const transport::PutCommand& c) {
    return c.local_offset == c.bytes * 3 && c.remote_offset == ~c.bytes;
}

TEST(capacity_is_a_power_of_two) {
    CHECK(transport::Fifo(2).handle().capacity == 2);
    CHECK(transport::Fifo(3).handle().capacity == 4);
    CHECK(transport::Fifo(1000).handle().capacity == 1024);
}

TEST(many_producers_many_laps) {
    constexpr std::uint32_t kProducers = 4;
    constexpr std::uint64_t kEach = 50'000;
    Bench b(16);
    std::vector<std::thread> producers;
    for (std::uint32_t p = 0; p < kProducers; ++p) {
        producers.emplace_back([&b, p] {
            for (std::uint64_t i = 0; i < kEach; ++i) {
                if (b.push(i, p) != WaitResult::ok) return;
            }
        });
    }
    std::uint64_t next[kProducers] = {};
    bool ordered = true;
    std::uint64_t got = 0;
    const std::uint64_t deadline = monotonic_ns() + 60'000'000'000u;
    transport::PutCommand c;
    while (got < kProducers * kEach && monotonic_ns() < deadline) {
        int n = 0;
        for (; n < 8 && b.fifo.host().pop(c); ++n) {
            ordered = ordered && c.peer < kProducers && c.bytes == next[c.peer]++ && whole(c);
        }
        got += static_cast<std::uint64_t>(n);
        b.fifo.release();
        if (n == 0) std::this_thread::yield();
    }
    for (auto& each : producers) each.join();
    CHECK(ordered);
    CHECK(got == kProducers * kEach);
    CHECK(b.fifo.depth() == 0);
}

TEST(full_ring_waits_and_loses_nothing) {
    Bench b(2);
    CHECK(b.push(0) == WaitResult::ok);
    CHECK(b.push(1) == WaitResult::ok);
    std::atomic<bool> through{false};
    std::thread producer([&] {
        CHECK(b.push(2) == WaitResult::ok);
        through = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!through);
    transport::PutCommand c;
    CHECK(b.fifo.host().pop(c) && c.bytes == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(!through);  // popped, but its slot is not released yet
    b.fifo.release();
    producer.join();
    CHECK(b.fifo.host().pop(c) && c.bytes == 1);
    CHECK(b.fifo.host().pop(c) && c.bytes == 2);
}

TEST(deadline_aborts_and_leaves_no_hole) {
    Bench b(2);
    b.push(0);
    b.push(1);
    const std::uint64_t start = monotonic_ns();
    CHECK(b.push(2, 0, 0.03) == WaitResult::timed_out);
    const double waited = static_cast<double>(monotonic_ns() - start) / 1e9;
    CHECK(waited >= 0.03 && waited < 10);
    CHECK(b.pad.aborted() == AbortCode::timeout);
    CHECK(b.push(3) == WaitResult::aborted);
    CHECK(b.fifo.pushed() == 2);  // no ticket was taken that nobody fills
}

TEST(abort_wakes_a_waiting_producer) {
    Bench b(2);
    b.push(0);
    b.push(1);
    WaitResult result = WaitResult::ok;
    std::thread producer([&] { result = b.push(2, 0, 60); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const std::uint64_t start = monotonic_ns();
    b.pad.abort(AbortCode::peer_failure, Diagnosis{});
    producer.join();
    CHECK(result == WaitResult::aborted);
    CHECK(monotonic_ns() - start < 30'000'000'000u);
}

TEST(push_ends_the_proxys_sleep) {
    Bench b(4);
    std::uint64_t count = 0;
    b.push(0);
    CHECK(::read(b.fifo.wake_fd(), &count, 8) < 0);  // nobody slept: no system call was made
    b.fifo.prepare_sleep();
    b.push(1);
    CHECK(::read(b.fifo.wake_fd(), &count, 8) == 8 && count == 1);
    b.push(2);
    CHECK(::read(b.fifo.wake_fd(), &count, 8) < 0);  // one wake is enough
    b.fifo.end_sleep();
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
