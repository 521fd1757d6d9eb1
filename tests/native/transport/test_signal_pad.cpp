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
