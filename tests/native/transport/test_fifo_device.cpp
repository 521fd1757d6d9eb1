// The command FIFO's ring for a device, and words that are republished, with threads in place of a grid.
// Every check is seen to fail on a planted fault. tests/native/cuda has the same on a GPU.
#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backends/transport/call_state.hpp"
#include "backends/transport/fifo.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/republish.hpp"
#include "tests/native/nics/check.hpp"
#include "tests/native/nics/pair.hpp"
#include "tests/native/transport/faulty_fifo.hpp"

using namespace mkernel;
using namespace mkernel::testing;
using mkernel::transport::AbortCode;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kPatience = 30'000 * kMs;

template <class Held>
bool soon(const Held& held) {
    const std::uint64_t deadline = monotonic_ns() + kPatience;
    while (!held()) {
        if (monotonic_ns() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

void rest_ms(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// A FIFO that threads push to as a device's would. They end with this object, at the latest by an abort.
class Rig {
  public:
    explicit Rig(std::uint64_t slots)
        : memory_(SignalPad::bytes(8)), pad(SignalPad::format(memory_.data(), 8)), fifo(slots) {
        claim();
    }
    ~Rig() {
        pad.abort(AbortCode::cancelled, {});
        join();
    }
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    void claim() {
        const transport::FifoRingMemory& ring = fifo.handle().device.memory;
        tickets = transport::FifoTickets::of(ring);
        device = {ring.slots, ring.tail, &tickets, ring.capacity};
    }
    // `threads` that push `each`.
    void push(std::uint32_t threads, std::uint32_t each, Fault fault,
              std::uint64_t timeout_ns = kPatience) {
        const transport::DeviceLimits limits{&pad.abort_record().code, timeout_ns};
        for (std::uint32_t producer = 0; producer < threads; ++producer) {
            threads_.emplace_back([=, this] {
                WaitResult result = WaitResult::ok;
                for (std::uint32_t n = 0; n < each && result == WaitResult::ok; ++n) {
                    result = testing::push(device, numbered(producer, n), limits, fault);
                }
                ++ends[static_cast<std::size_t>(result)];
                ++over;
            });
        }
    }
    void join() {
        for (auto& each : threads_) each.join();
        threads_.clear();
    }

  private:
    nics::testing::Memory memory_;

  public:
    SignalPad pad;
    transport::Fifo fifo;
    transport::FifoTickets tickets;
    transport::FifoDevice device;
    std::atomic<int> ends[3]{};
    std::atomic<int> over{0};

  private:
    std::vector<std::thread> threads_;
};

bool same(const transport::PutCommand& one, const transport::PutCommand& other) {
    return std::memcmp(&one, &other, sizeof(one)) == 0;
}

// ---- checks: true where they hold

bool many_laps(std::uint64_t slots, std::uint32_t producers, std::uint32_t each, Fault fault) {
    Rig rig(slots);
    rig.push(producers, each, fault);
    std::vector<std::uint64_t> next(producers);
    transport::PutCommand got;
    bool right = true;
    for (std::uint64_t n = 0; n < std::uint64_t{producers} * each; ++n) {
        if (!soon([&] { return rig.fifo.device().pop(got); })) return false;
        right = right && got.region < producers;
        right = right && same(got, numbered(got.region, next[got.region]++));
        // Now and then, so that the ring is full at times.
        if (n % 3 == 0 || fault != Fault::none) rig.fifo.release();
        if (n % slots == slots - 1) rig.fifo.release();
    }
    rig.fifo.release();
    rig.join();
    return right && rig.fifo.depth() == 0 && rig.ends[0] == static_cast<int>(producers);
}

bool a_full_ring_waits(Fault fault) {
    Rig rig(4);
    transport::FifoRing& ring = rig.fifo.device();
    rig.push(1, 6, fault);
    soon([&] { return ring.published() == 4 || rig.over == 1; });
    rest_ms(20);
    if (rig.over != 0 || ring.published() != 4) return false;
    transport::PutCommand got;
    for (std::uint64_t n = 0; n < 6; ++n) {
        if (!soon([&] { return ring.pop(got); }) || !same(got, numbered(0, n))) return false;
        rig.fifo.release();
    }
    rig.join();
    return rig.ends[0] == 1;
}

// Eight threads, four slots, nobody drains: one times out, which ends the others.
bool giving_up_leaves_no_hole(Fault fault) {
    Rig rig(4);
    constexpr std::uint64_t kDeadline = 20 * kMs;
    const std::uint64_t start = monotonic_ns();
    rig.push(8, 1, fault, kDeadline);
    rig.join();
    if (monotonic_ns() - start < kDeadline) return false;
    if (rig.tickets.head != 4 || rig.ends[0] != 4 || rig.ends[1] != 3 || rig.ends[2] != 1) {
        return false;
    }
    // Another claim goes on where the ring stands: two drained, two still in it.
    transport::FifoRing& ring = rig.fifo.device();
    transport::PutCommand got;
    if (!ring.pop(got) || !ring.pop(got)) return false;
    rig.fifo.release();
    rig.claim();
    rig.push(1, 3, Fault::none);
    for (int left = 0; left < 5; ++left) {
        if (!soon([&] { return ring.pop(got); })) return false;
        rig.fifo.release();
    }
    rig.join();
    return same(got, numbered(0, 2));
}

bool an_abort_ends_pushes(Fault fault) {
    Rig rig(4);
    rig.push(12, 1, fault, fault == Fault::none ? kPatience : 300 * kMs);
    if (!soon([&] { return rig.fifo.device().published() == 4; })) return false;
    rig.pad.abort(AbortCode::peer_failure, {});
    rig.join();
    return rig.ends[0] == 4 && rig.ends[1] == 8;
}

// Whoever sees the copy of a word sees what was written before the word was raised. A run of nine words
// with a gap in it; two lanes share it.
bool a_copy_comes_after_the_data(Fault fault) {
    constexpr std::uint64_t kRounds = 500;
    constexpr std::uint32_t kFirst = 3, kWords = 12, kGapAt = 5, kGap = 3;
    nics::testing::Memory memory(SignalPad::bytes(16));
    const SignalPad pad = SignalPad::format(memory.data(), 16);
    transport::ExpectedCount expected[kWords];
    transport::SetWord copies[kWords];
    std::uint64_t data = 0;  // plain
    std::atomic<std::uint64_t> acknowledged{0};
    const transport::DeviceLimits limits{&pad.abort_record().code, kPatience};
    const transport::Republished run{pad.word(kFirst), expected, copies,
                                     kWords - kGap,    kGapAt,   kGap};
    std::atomic<int> failures{0};
    std::vector<std::thread> publishers;
    for (std::uint32_t lane = 0; lane < 2; ++lane) {
        publishers.emplace_back([&, lane] {
            for (std::uint64_t round = 1; round <= kRounds; ++round) {
                if (fault == Fault::none) {
                    if (transport::republish(run, round, limits, {lane, 2}) != WaitResult::ok) {
                        ++failures;
                    }
                } else if (lane == 0) {
                    copies[kWords - 1].set(round);
                }
                soon([&] { return acknowledged >= round; });
            }
        });
    }
    std::uint64_t wrong = 0;
    std::thread waiter([&] {
        for (std::uint64_t round = 1; round <= kRounds; ++round) {
            if (!soon([&] { return copies[kWords - 1].reached(round); })) return;
            if (fault == Fault::none && data < round) ++wrong;
            if (fault != Fault::none && pad.load(kFirst + kWords - 1) < round) ++wrong;
            acknowledged = round;
        }
    });
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
        if (fault != Fault::none) soon([&] { return acknowledged >= round; });
        if (fault == Fault::none) data = round;
        for (std::uint32_t word = 0; word < kWords; ++word) {
            if (word < kGapAt || word >= kGapAt + kGap) pad.add(kFirst + word, 1);
        }
        soon([&] { return acknowledged >= round; });
    }
    waiter.join();
    for (std::thread& each : publishers) each.join();
    return wrong == 0 && failures == 0 && acknowledged == kRounds && copies[kGapAt].load() == 0 &&
           (fault != Fault::none || expected[kWords - 1].value == kRounds);
}

// ---- that they hold, and what they catch

TEST(producers_in_parallel_over_many_laps) {
    CHECK(many_laps(16, 4, 20'000, Fault::none));
    CHECK(many_laps(2, 3, 3'000, Fault::none));
    CHECK(many_laps(1, 2, 1'000, Fault::none));
}

TEST(a_payload_after_its_commit_is_caught) {
    CHECK(!many_laps(4, 1, 8, Fault::commit_before_payload));
}

TEST(a_full_ring_waits_and_loses_nothing) {
    CHECK(a_full_ring_waits(Fault::none));
    CHECK(!a_full_ring_waits(Fault::tail_not_waited_for));
}

TEST(a_deadline_leaves_no_hole) {
    CHECK(giving_up_leaves_no_hole(Fault::none));
    CHECK(!giving_up_leaves_no_hole(Fault::ticket_before_room));
}

TEST(an_abort_ends_waiting_pushes) {
    CHECK(an_abort_ends_pushes(Fault::none));
    CHECK(!an_abort_ends_pushes(Fault::abort_not_looked_at));
}

TEST(after_a_time_out_no_push_succeeds) {
    Rig rig(2);
    const transport::DeviceLimits limits{&rig.pad.abort_record().code, 5 * kMs};
    CHECK(rig.device.push({}, limits) == WaitResult::ok);
    CHECK(rig.device.push({}, limits) == WaitResult::ok);
    CHECK(rig.device.push({}, limits) == WaitResult::timed_out);
    transport::PutCommand got;
    CHECK(rig.fifo.device().pop(got));
    rig.fifo.release();
    CHECK(rig.device.push({}, limits) == WaitResult::aborted);
}

TEST(republished_words) {
    CHECK(a_copy_comes_after_the_data(Fault::none));
    CHECK(!a_copy_comes_after_the_data(Fault::republish_before_word));
}

// What earlier calls added satisfies no later one, and an addition that came early is not lost.
TEST(a_copy_waits_for_the_addition_of_its_own_call) {
    Rig rig(2);
    std::vector<transport::ExpectedCount> expected(1);
    std::vector<transport::SetWord> copy(1);
    const transport::Republished run{rig.pad.word(0), expected.data(), copy.data(), 1};
    const std::uint32_t* abort = &rig.pad.abort_record().code;
    rig.pad.add(0, 1);
    CHECK(transport::republish(run, 7, {abort, kPatience}) == WaitResult::ok);
    CHECK(copy[0].load() == 7);
    CHECK(transport::republish(run, 8, {abort, 5 * kMs}) == WaitResult::timed_out);
    CHECK(copy[0].load() == 7);
    CHECK(transport::first_missing(run, 8) == 0);
    rig.pad.add(0, 2);
    CHECK(transport::republish(run, 8, {abort, kPatience}) == WaitResult::ok);
    CHECK(transport::first_missing(run, 8) == 1);
    CHECK(transport::republish(run, 9, {abort, kPatience}) == WaitResult::ok);
    CHECK(expected[0].value == 3);
}

TEST(republishing_ends_by_its_deadline_and_by_an_abort) {
    Rig rig(2);
    std::vector<transport::ExpectedCount> expected(1);
    std::vector<transport::SetWord> copy(1);
    const transport::Republished run{rig.pad.word(0), expected.data(), copy.data(), 1};
    const std::uint32_t* abort = &rig.pad.abort_record().code;
    CHECK(transport::republish(run, 1, {abort, 5 * kMs}) == WaitResult::timed_out);
    const std::uint32_t failed = 1;
    CHECK(transport::republish(run, 1, {abort, kPatience, &failed}) == WaitResult::aborted);
    rig.pad.abort(AbortCode::peer_failure, {});
    CHECK(transport::republish(run, 1, {abort, kPatience}) == WaitResult::aborted);
}

// Of one FIFO, each with its own order and its own tickets.
TEST(the_two_rings_do_not_disturb_each_other) {
    constexpr std::uint32_t kEach = 2'000;
    Rig rig(8);
    rig.push(2, kEach, Fault::none);
    std::thread host([&] {
        for (std::uint64_t n = 0; n < kEach; ++n) {
            CHECK(rig.fifo.handle().push(numbered(9, n), rig.pad, monotonic_ns() + kPatience, {}) ==
                  WaitResult::ok);
        }
    });
    std::uint64_t next[10] = {};
    bool right = true;
    std::uint32_t popped = 0;
    const auto pop = [&] {  // what there is, one of each ring
        const std::uint32_t before = popped;
        transport::PutCommand got;
        for (transport::FifoRing* ring : {&rig.fifo.host(), &rig.fifo.device()}) {
            if (!ring->pop(got)) continue;
            right = right && (got.region == 9) == (ring == &rig.fifo.host()) &&
                    same(got, numbered(got.region, next[got.region]++));
            ++popped;
        }
        rig.fifo.release();
        return popped > before;
    };
    // The deadline is that of the next command: on a busy machine each lap of a ring waits for its turn.
    while (popped < 3 * kEach && soon(pop)) {
    }
    CHECK(next[0] == kEach && next[1] == kEach && next[9] == kEach);
    CHECK(right);
    host.join();
    rig.join();
}

// As if so many commands had gone through the ring before: a host takes the place of the proxy.
TEST(tickets_go_over_the_edges_of_their_words) {
    constexpr std::uint64_t kSlots = 4;
    for (const std::uint64_t edge :
         {std::uint64_t{1} << 32, std::uint64_t{1} << 62, std::uint64_t{1} << 63}) {
        transport::FifoSlot slots[kSlots];
        std::uint64_t tail = edge - 6;
        for (std::uint64_t lap = tail - kSlots; lap != tail; ++lap) {
            slots[lap % kSlots].commit = transport::FifoSlot::commit_word(lap, kSlots);
        }
        transport::FifoTickets tickets;
        tickets.head = tickets.tail = tail;
        tickets.free = kSlots;
        const std::uint32_t abort = 0;
        const transport::DeviceLimits limits{&abort, kPatience, nullptr};
        const transport::FifoDevice fifo{slots, &tail, &tickets, kSlots};
        for (std::uint64_t ticket = edge - 6; ticket != edge + 6; ++ticket) {
            const transport::FifoSlot& slot = slots[ticket % kSlots];
            const std::uint64_t fresh = transport::FifoSlot::commit_word(ticket, kSlots);
            CHECK(slot.commit != fresh);  // of the lap before
            transport::PutCommand command;
            command.bytes = ticket;
            CHECK(fifo.push(command, limits) == WaitResult::ok);
            CHECK(slot.commit == fresh && slot.command.bytes == ticket);
            if (ticket % 2 != 0) tail = ticket + 1;  // drained by twos
        }
        const transport::DeviceLimits soon{&abort, kMs, nullptr};
        for (std::uint64_t i = 0; i < kSlots; ++i) CHECK(fifo.push({}, limits) == WaitResult::ok);
        CHECK(fifo.push({}, soon) == WaitResult::timed_out);  // full, and seen to be
    }
}

TEST(a_ring_takes_one_device) {
    transport::Fifo fifo(4);
    CHECK(!fifo.device_claimed());
    CHECK(fifo.handle().claim_device());
    CHECK(fifo.device_claimed());
    CHECK(!fifo.handle().claim_device());
    fifo.handle().release_device();
    CHECK(!fifo.device_claimed());
    CHECK(fifo.handle().claim_device());
}

TEST(a_ring_lies_in_pages_of_its_own) {
    const transport::Fifo fifo(1024);
    const transport::FifoRingMemory& ring = fifo.handle().device.memory;
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const auto at = [](const void* address) { return reinterpret_cast<std::uint64_t>(address); };
    CHECK(at(ring.pages) % page == 0 && ring.bytes % page == 0);
    CHECK(at(ring.slots) % 64 == 0 && at(ring.tail) >= at(ring.pages));
    CHECK(at(ring.slots + ring.capacity) <= at(ring.pages) + ring.bytes);
}

// Of many that wait for room one is late and stops the others, which may be heard of before it.
TEST(the_first_that_is_late_records_why_whoever_gave_up_before) {
    transport::CallState state{};
    CHECK(!state.give_up(false));
    CHECK(state.give_up(true));
    CHECK(!state.give_up(true) && !state.give_up(false));
    CHECK(state.failed != 0);
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
