// The proxy on a NIC whose queues the test opens and shuts.
#include <array>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/nics/proxy.hpp"
#include "backends/transport/fifo_device.hpp"
#include "check.hpp"
#include "idle_nic.hpp"
#include "pair.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kPatience = 30 * kSecond;

// Takes a put in two steps where a peer's queue is open. What it takes is complete at once, or, while
// it holds, once it is let.
class GatedNic final : public testing::IdleNic {
  public:
    static constexpr std::uint32_t kPeers = 4;

    void open(std::uint32_t peer, bool open = true) { open_[peer] = open; }
    std::vector<std::uint64_t> taken(std::uint32_t peer) {
        const std::lock_guard lock(mutex_);
        return taken_[peer];
    }

    void hold(bool hold) { holds_ = hold; }
    // Of the puts since it holds, so many.
    void let_complete(std::uint64_t puts) { complete_ = puts; }
    void mark(std::uint32_t number) override { marks_[number] = posted_; }
    bool reached_mark(std::uint32_t number) const override {
        return !holds_ || complete_ >= marks_[number];
    }

    PutResult put(const transport::PutCommand& c, PutCursor& cursor) override {
        if (!cursor.begun) {  // the first half always fits
            if (half_[c.peer]) overtaken_ = true;
            half_[c.peer] = true;
            cursor.begun = true;
        }
        if (!open_[c.peer]) return PutResult::busy;
        half_[c.peer] = false;
        if (holds_) ++posted_;
        const std::lock_guard lock(mutex_);
        taken_[c.peer].push_back(c.bytes);
        return PutResult::done;
    }

    std::atomic<bool> overtaken_{false};  // a put began before the peer's last one had ended

  private:
    std::array<std::atomic<bool>, kPeers> open_{};
    std::array<bool, kPeers> half_{};
    std::atomic<bool> holds_{false};
    std::atomic<std::uint64_t> complete_{0};
    std::uint64_t posted_ = 0;
    std::array<std::uint64_t, kMarks> marks_{};
    std::mutex mutex_;
    std::array<std::vector<std::uint64_t>, kPeers> taken_;
};

struct Rig {
    explicit Rig(std::uint64_t slots)
        : fifo(slots),
          memory(SignalPad::bytes(64)),
          pad(SignalPad::format(memory.data(), 64)),
          proxy(nic, fifo, pad, {}) {}
    WaitResult push(std::uint32_t peer, std::uint64_t number, std::uint64_t wait = kPatience) {
        transport::PutCommand c;
        c.peer = peer;
        c.bytes = number;
        return fifo.handle().push(c, pad, monotonic_ns() + wait, {});
    }
    bool soon(const std::function<bool()>& held) const {
        const std::uint64_t deadline = monotonic_ns() + kPatience;
        while (!held()) {
            if (monotonic_ns() > deadline) return false;
            std::this_thread::yield();
        }
        return true;
    }
    GatedNic nic;
    transport::Fifo fifo;
    testing::Memory memory;
    SignalPad pad;
    Proxy proxy;
};

std::vector<std::uint64_t> numbers(std::uint64_t from, std::uint64_t to) {
    std::vector<std::uint64_t> all;
    for (std::uint64_t i = from; i < to; ++i) all.push_back(i);
    return all;
}

// Peer 0's queue is full with more commands behind it than the FIFO has slots; peers 1 and 2 do not
// notice. When it opens, all comes, in order and once.
TEST(a_full_peer_holds_up_nobody_and_loses_nothing) {
    Rig rig(64);
    rig.nic.open(1);
    rig.nic.open(2);
    for (std::uint64_t i = 0; i < 60; ++i) CHECK(rig.push(0, i) == WaitResult::ok);
    for (std::uint64_t i = 0; i < 500; ++i) {
        CHECK(rig.push(1, i) == WaitResult::ok);
        CHECK(rig.push(2, i) == WaitResult::ok);
    }
    CHECK(rig.soon([&] { return rig.nic.taken(1).size() + rig.nic.taken(2).size() == 1000; }));
    CHECK(rig.nic.taken(0).empty());
    CHECK(rig.proxy.statistics().queue_depth == 60);
    CHECK(rig.proxy.statistics().stalls == 1);
    CHECK(!rig.proxy.flush(monotonic_ns() + kSecond / 20));
    rig.nic.open(0);
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    CHECK(rig.nic.taken(0) == numbers(0, 60));
    CHECK(rig.nic.taken(1) == numbers(0, 500));
    CHECK(rig.nic.taken(2) == numbers(0, 500));
    CHECK(rig.proxy.statistics().queue_depth == 0);
    CHECK(!rig.nic.overtaken_);
}

// Queues that open and shut all the time, with every peer busy.
TEST(order_holds_while_queues_come_and_go) {
    constexpr std::uint64_t kEach = 3000;
    Rig rig(16);
    std::atomic<bool> over{false};
    std::thread gate([&] {
        std::uint32_t n = 0;
        while (!over) {
            rig.nic.open(n % GatedNic::kPeers, n % 7 < 4);
            ++n;
            std::this_thread::yield();
        }
        for (std::uint32_t peer = 0; peer < GatedNic::kPeers; ++peer) rig.nic.open(peer);
    });
    for (std::uint64_t i = 0; i < kEach; ++i) {
        for (std::uint32_t peer = 0; peer < GatedNic::kPeers; ++peer) {
            CHECK(rig.push(peer, i) == WaitResult::ok);
        }
        if (i % 100 == 0) CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    }
    over = true;
    gate.join();
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    for (std::uint32_t peer = 0; peer < GatedNic::kPeers; ++peer) {
        CHECK(rig.nic.taken(peer) == numbers(0, kEach));
    }
    CHECK(!rig.nic.overtaken_);
}

// A flush waits for the commands before it, also where they were set aside, and for no later ones.
TEST(a_flush_covers_what_was_set_aside_and_nothing_later) {
    Rig rig(64);
    rig.nic.open(1);
    CHECK(rig.push(1, 0) == WaitResult::ok);
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    CHECK(rig.push(0, 0) == WaitResult::ok);  // to a shut queue
    CHECK(rig.push(1, 1) == WaitResult::ok);
    CHECK(!rig.proxy.flush(monotonic_ns() + kSecond / 20));
    std::thread waiter([&] { CHECK(rig.proxy.flush(monotonic_ns() + kPatience)); });
    rig.nic.open(0);
    waiter.join();
    rig.nic.open(0, false);
    CHECK(rig.push(0, 1) == WaitResult::ok);
    CHECK(rig.soon([&] { return rig.nic.taken(0).size() == 1; }));
    CHECK(rig.nic.taken(1) == numbers(0, 2));
}

// What a device pushed is covered once its push has ended, and commands of both rings keep their peer's
// order among those of their ring.
TEST(a_flush_covers_what_a_device_pushed) {
    Rig rig(64);
    const transport::FifoRingMemory& ring = rig.fifo.handle().device.memory;
    auto tickets = transport::FifoTickets::of(ring);
    const transport::FifoDevice device{ring.slots, ring.tail, &tickets, ring.capacity};
    const auto push = [&](std::uint32_t peer, std::uint64_t number) {
        transport::PutCommand c;
        c.peer = peer;
        c.bytes = number;
        return device.push(c, {&rig.pad.abort_record().code, kPatience});
    };
    CHECK(rig.fifo.handle().claim_device());
    rig.nic.open(1);
    for (std::uint64_t i = 0; i < 500; ++i) CHECK(push(1, i) == WaitResult::ok);
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    CHECK(rig.nic.taken(1) == numbers(0, 500));
    CHECK(push(0, 0) == WaitResult::ok);  // to a shut queue
    CHECK(rig.push(1, 500) == WaitResult::ok);
    CHECK(!rig.proxy.flush(monotonic_ns() + kSecond / 20));
    CHECK(rig.nic.taken(1) == numbers(0, 501));
    CHECK(rig.proxy.statistics().queue_depth == 1);
    rig.nic.open(0);
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    CHECK(rig.nic.taken(0) == numbers(0, 1));
    CHECK(rig.proxy.statistics().queue_depth == 0);
}

// A completion waits for the commands before it, also where they were set aside, and then for the NIC;
// later commands are handed over meanwhile.
TEST(a_completion_waits_for_what_was_put_before) {
    Rig rig(64);
    const auto complete = [&](std::uint32_t signal, std::uint32_t value) {
        transport::PutCommand c;
        c.peer = transport::PutCommand::kSelf;
        c.signal = signal;
        c.value = value;
        return rig.fifo.handle().push(c, rig.pad, monotonic_ns() + kPatience, {});
    };
    const auto raised = [&](std::uint32_t signal, std::uint64_t value) {
        return rig.pad.wait(signal, value, monotonic_ns() + kPatience, {}) == WaitResult::ok;
    };
    rig.nic.open(1);
    CHECK(complete(3, 7) == WaitResult::ok);  // of nothing
    CHECK(raised(3, 7));
    rig.nic.hold(true);
    CHECK(rig.push(1, 0) == WaitResult::ok);
    CHECK(complete(4, 1) == WaitResult::ok);
    rig.nic.let_complete(1);
    CHECK(raised(4, 1));
    CHECK(rig.push(0, 0) == WaitResult::ok);  // to a shut queue
    CHECK(complete(5, 1) == WaitResult::ok);
    for (std::uint64_t i = 1; i <= 40; ++i) {
        CHECK(rig.push(1, i) == WaitResult::ok);
        CHECK(complete(6, 1) == WaitResult::ok);
    }
    CHECK(rig.soon([&] { return rig.nic.taken(1).size() == 41; }));
    rig.nic.let_complete(41);
    CHECK(!rig.proxy.flush(monotonic_ns() + kSecond / 20));
    CHECK(rig.pad.load(5) == 0 && rig.pad.load(6) == 0);
    rig.nic.open(0);
    CHECK(rig.soon([&] { return rig.nic.taken(0).size() == 1; }));
    CHECK(!rig.proxy.flush(monotonic_ns() + kSecond / 20));
    CHECK(rig.pad.load(5) == 0);
    rig.nic.let_complete(42);
    CHECK(rig.proxy.flush(monotonic_ns() + kPatience));
    CHECK(rig.pad.load(5) == 1 && rig.pad.load(6) == 40);  // a flush covers completions
    CHECK(rig.proxy.statistics().puts == 42);
}

// Completions come one by one although far more are pushed than there are marks, or room for them.
TEST(a_completion_does_not_wait_for_what_is_put_after) {
    Rig rig(8);
    rig.nic.open(1);
    rig.nic.hold(true);
    std::thread producer([&] {
        for (std::uint64_t i = 0; i < 100; ++i) {
            CHECK(rig.push(1, i) == WaitResult::ok);
            transport::PutCommand c;
            c.peer = transport::PutCommand::kSelf;
            c.signal = 2;
            c.value = 1;
            CHECK(rig.fifo.handle().push(c, rig.pad, monotonic_ns() + kPatience, {}) ==
                  WaitResult::ok);
        }
    });
    for (std::uint64_t i = 1; i <= 100; ++i) {
        CHECK(rig.soon([&] { return rig.nic.taken(1).size() >= i; }));
        CHECK(rig.pad.load(2) < i);
        rig.nic.let_complete(i);
        CHECK(rig.pad.wait(2, i, monotonic_ns() + kPatience, {}) == WaitResult::ok);
    }
    producer.join();
}

TEST(a_completion_of_a_signal_that_is_not_there_is_an_invalid_put) {
    for (const bool bytes : {false, true}) {
        Rig rig(8);
        transport::PutCommand c;
        c.peer = transport::PutCommand::kSelf;
        c.signal = bytes ? 3 : 64;
        c.bytes = bytes ? 8 : 0;
        CHECK(rig.fifo.handle().push(c, rig.pad, monotonic_ns() + kPatience, {}) == WaitResult::ok);
        CHECK(rig.soon([&] { return rig.pad.aborted() == transport::AbortCode::nic_error; }));
        CHECK(rig.nic.failure() && rig.nic.failure()->status == "INVALID_PUT");
    }
}

// With everything set aside that there is room for, producers wait, and time out: nothing is lost.
TEST(a_full_waiting_room_is_back_pressure) {
    Rig rig(4);
    std::uint64_t pushed = 0;
    while (rig.push(0, pushed, kSecond / 20) == WaitResult::ok) ++pushed;
    CHECK(pushed == 8);  // the FIFO's slots, and as many set aside
    CHECK(rig.proxy.statistics().queue_depth == 8);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv);
}
