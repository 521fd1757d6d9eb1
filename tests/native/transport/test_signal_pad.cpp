// The signal pad: order of data and signal, sleepers, deadlines, the first abort that stays.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "backends/transport/signal_pad.hpp"
#include "tests/native/nics/check.hpp"

using namespace mkernel::transport;
namespace testing = mkernel::nics::testing;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

struct Pad {
    Pad()
        : memory(
              ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
          pad(SignalPad::format(memory, kSignals)) {}
    ~Pad() { ::munmap(memory, kBytes); }
    Pad(const Pad&) = delete;
    Pad& operator=(const Pad&) = delete;
    static constexpr std::uint32_t kSignals = 256;
    static constexpr std::size_t kBytes = SignalPad::bytes(kSignals);
    void* memory;
    SignalPad pad;
};

// Plain words, published by a signal and read behind it, there and back: a missing release or
// acquire is a race that the detector reports.
TEST(a_signal_publishes_what_was_written_before) {
    const Pad p;
    constexpr std::uint64_t kTurns = 2000;
    std::uint64_t word = 0;
    std::atomic<int> wrong{0};
    std::thread other([&] {
        for (std::uint64_t i = 1; i <= kTurns; ++i) {
            if (p.pad.wait(0, i, monotonic_ns() + 30 * kSecond, {}) != WaitResult::ok) ++wrong;
            if (word != 2 * i - 1) ++wrong;
            word = 2 * i;
            p.pad.add(1, 1);
        }
    });
    for (std::uint64_t i = 1; i <= kTurns; ++i) {
        word = 2 * i - 1;
        p.pad.add(0, 1);
        if (p.pad.wait(1, i, monotonic_ns() + 30 * kSecond, {}) != WaitResult::ok) ++wrong;
        if (word != 2 * i) ++wrong;
    }
    other.join();
    CHECK(wrong == 0);
}

// Calls of plans that use the same words for other things: so many additions each, by several threads.
// Some of them, which their own call does not wait for, come when the next call has begun. No wait ends
// before its own call's additions have come, and none is left waiting.
TEST(plans_share_added_words_though_additions_come_late) {
    const Pad p;
    constexpr std::uint32_t kCalls = 600, kWords = 3, kAdders = 4;
    const auto share = [](std::uint32_t call, std::uint32_t word) {
        return std::uint64_t{(call * 7 + word * 5) % 4};
    };
    const auto is_late = [](std::uint32_t call, std::uint32_t word) {
        return (call + word) % 4 == 0;
    };
    std::atomic<std::uint64_t> added[kCalls][kWords] = {};
    std::atomic<std::uint32_t> begun{0};
    std::atomic<int> wrong{0};
    const auto add_all = [&](bool late) {
        for (std::uint32_t call = 0; call < kCalls; ++call) {
            while (begun.load() <= call + (late ? 1 : 0)) std::this_thread::yield();
            for (std::uint32_t word = 0; word < kWords; ++word) {
                if (is_late(call, word) != late) continue;
                added[call][word] += share(call, word);
                p.pad.add(word, share(call, word));
            }
        }
    };
    std::vector<std::thread> adders;
    for (std::uint32_t adder = 0; adder < kAdders; ++adder) {
        adders.emplace_back([&] { add_all(false); });
        adders.emplace_back([&] { add_all(true); });
    }
    for (std::uint32_t call = 0; call < kCalls; ++call) {
        ++begun;
        for (std::uint32_t word = 0; word < kWords; ++word) {
            if (is_late(call, word)) continue;
            const std::uint64_t amount = kAdders * share(call, word);
            if (p.pad.wait(word, p.pad.expected(word).after(amount), monotonic_ns() + 30 * kSecond,
                           {}) != WaitResult::ok) {
                ++wrong;
            }
            if (added[call][word] != amount) ++wrong;
        }
        for (std::uint32_t word = 0; word < kWords; ++word) {
            p.pad.expected(word).move_on(kAdders * share(call, word));
        }
    }
    ++begun;
    for (std::thread& adder : adders) adder.join();
    for (std::uint32_t word = 0; word < kWords; ++word) {
        CHECK(p.pad.load(word) == p.pad.expected(word).value);
    }
    CHECK(wrong == 0);
}

TEST(many_adders_lose_nothing) {
    const Pad p;
    constexpr std::uint64_t kEach = 20'000;
    std::vector<std::thread> adders;
    for (int a = 0; a < 4; ++a) {
        adders.emplace_back([&] {
            for (std::uint64_t i = 0; i < kEach; ++i) p.pad.add(7, 3);
        });
    }
    CHECK(p.pad.wait(7, 4 * kEach * 3, monotonic_ns() + 30 * kSecond, {}) == WaitResult::ok);
    for (auto& each : adders) each.join();
    CHECK(p.pad.load(7) == 4 * kEach * 3);
    CHECK(p.pad.load(7 + SignalPadHeader::kBells) == 0);  // shares the bell, not the counter
}

TEST(a_deadline_leaves_one_diagnosis) {
    const Pad p;
    Diagnosis who;
    who.peer = 5;
    const std::uint64_t start = monotonic_ns();
    CHECK(p.pad.wait(3, 9, start + kSecond / 50, who) == WaitResult::timed_out);
    const std::uint64_t waited = monotonic_ns() - start;
    CHECK(waited >= kSecond / 50 && waited < 10 * kSecond);
    CHECK(p.pad.aborted() == AbortCode::timeout);
    CHECK(!p.pad.abort(AbortCode::nic_error, {}));  // the first one stays
    CHECK(p.pad.aborted() == AbortCode::timeout);
    CHECK(p.pad.wait(3, 9, monotonic_ns() + kSecond, {}) == WaitResult::aborted);
}

TEST(a_writer_that_does_not_ring_is_seen) {
    const Pad p;
    std::thread writer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        static_cast<SetWord&>(const_cast<Word&>(*p.pad.word(3))).set(9);
    });
    CHECK(p.pad.wait(3, 9, monotonic_ns() + 30 * kSecond, {}) == WaitResult::ok);
    writer.join();
}

TEST(who_waits_longer_looks_more_seldom) {
    CHECK(SignalPad::pause_ns(0) == SignalPad::kMaxSleepNs);
    CHECK(SignalPad::pause_ns(8 * SignalPad::kMaxSleepNs) == SignalPad::kMaxSleepNs);
    CHECK(SignalPad::pause_ns(kSecond / 4) == kSecond / 32);
    CHECK(SignalPad::pause_ns(3600 * kSecond) == SignalPad::kSeldomSleepNs);
}

TEST(an_abort_wakes_all_waiters) {
    const Pad p;
    std::atomic<int> woken{0};
    std::vector<std::thread> waiters;
    for (std::uint32_t w = 0; w < 6; ++w) {
        waiters.emplace_back([&, w] {
            if (p.pad.wait(w * 40, 1, monotonic_ns() + 30 * kSecond, {}) == WaitResult::aborted) {
                ++woken;
            }
        });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::atomic<int> first{0};
    std::thread rival([&] { first += p.pad.abort(AbortCode::peer_failure, {}) ? 1 : 0; });
    first += p.pad.abort(AbortCode::nic_error, {}) ? 1 : 0;
    rival.join();
    for (auto& each : waiters) each.join();
    CHECK(woken == 6);
    CHECK(first == 1);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv);
}
