// Words of both kinds under calls of two plans that share them: memory order, reuse, and what the checks
// see of counts that are moved on wrongly. The same on a GPU: tests/native/cuda/replayed_words.cu.
#include <sys/mman.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "backends/transport/signal_pad.hpp"
#include "tests/native/nics/check.hpp"

using namespace mkernel::transport;
namespace testing = mkernel::nics::testing;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint32_t kChunks = 3;

struct Plan {
    std::uint32_t chunks;     // of the data, at most kChunks; one addition each
    std::uint64_t additions;  // a chunk
};
constexpr Plan kPlans[] = {{2, 1}, {kChunks, 4}};

// What one rank lets the other write, and what it keeps itself.
struct Rank {
    std::uint64_t added_data[kChunks] = {};
    std::uint64_t set_data[kChunks] = {};
    AddedWord added[kChunks];
    SetWord set[kChunks];
    SetWord finished;
    ExpectedCount expected[kChunks];
    std::uint64_t epoch = 1;
    int wrong = 0;
};

bool wait(const Word& word, std::uint64_t wanted, std::uint64_t limit_ns = 30 * kSecond) {
    const std::uint64_t deadline = monotonic_ns() + limit_ns;
    while (!word.reached(wanted)) {
        if (monotonic_ns() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

// One call on one rank. It knows no number of the call but those in its memory.
void run(const Plan& plan, Rank& own, Rank& peer) {
    const std::uint64_t epoch = own.epoch;
    for (std::uint32_t c = 0; c < plan.chunks; ++c) {
        peer.added_data[c] = epoch * 10 + c;
        peer.added[c].add(plan.additions);
        peer.set_data[c] = epoch * 100 + c;
        peer.set[c].set(epoch);
    }
    for (std::uint32_t c = 0; c < plan.chunks; ++c) {
        if (!wait(own.added[c], own.expected[c].after(plan.additions))) ++own.wrong;
        if (own.added_data[c] != epoch * 10 + c) ++own.wrong;
        if (!wait(own.set[c], epoch)) ++own.wrong;
        if (own.set_data[c] != epoch * 100 + c) ++own.wrong;
    }
    peer.finished.set(epoch);
    if (!wait(own.finished, epoch)) ++own.wrong;
    for (std::uint32_t c = 0; c < plan.chunks; ++c) own.expected[c].move_on(plan.additions);
    own.epoch = epoch + 1;
}

// Plain data on both sides of the words: a missing release or acquire is a race that the detector reports.
TEST(plans_that_share_words_follow_each_other_in_any_order) {
    Rank ranks[2];
    std::vector<int> order(2000);
    std::mt19937 random(1);
    for (int& plan : order) plan = static_cast<int>(random() % 2);
    const auto calls = [&](int rank) {
        for (const int plan : order) run(kPlans[plan], ranks[rank], ranks[1 - rank]);
    };
    std::thread other(calls, 1);
    calls(0);
    other.join();
    for (const Rank& rank : ranks) {
        CHECK(rank.wrong == 0);
        CHECK(rank.epoch == order.size() + 1);
        for (std::uint32_t c = 0; c < kChunks; ++c) {
            CHECK(rank.added[c].load() == rank.expected[c].value);
        }
    }
}

TEST(a_count_that_is_not_moved_on_lets_the_next_call_read_too_early) {
    AddedWord word;
    ExpectedCount expected;
    word.add(2);
    CHECK(word.reached(expected.after(2)));
    CHECK(word.reached(expected.after(2)));  // of the next call, which nobody has added for
    expected.move_on(2);
    CHECK(!word.reached(expected.after(1)));
}

TEST(a_count_that_is_moved_on_twice_is_never_reached) {
    AddedWord word;
    ExpectedCount expected;
    word.add(2);
    expected.move_on(2);
    expected.move_on(2);
    word.add(2);
    CHECK(!wait(word, expected.after(2), kSecond / 100));
}

TEST(numbers_of_messages_grow_and_stay_below_the_one_that_ends_waits) {
    CHECK(message_number(1, 0) > message_number(0, (1u << kMessageBits) - 1));
    CHECK(message_number(7, 2) == (7u << 20) + 2);
    const std::uint64_t last = (std::uint64_t{1} << 41) - 1;  // 2e12 calls
    CHECK(message_number(last, (1u << kMessageBits) - 1) < kEndsWaits);
    SetWord word;
    word.set(kEndsWaits);
    CHECK(word.reached(message_number(last, 9)));
}

TEST(a_host_ends_waits_for_a_set_word) {
    const std::size_t nbytes = SignalPad::bytes(8);
    void* memory =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const SignalPad pad = SignalPad::format(memory, 8);
    std::thread waiter([&] {
        CHECK(pad.wait(5, message_number(3, 1), monotonic_ns() + 30 * kSecond, {}) ==
              WaitResult::ok);
    });
    pad.end_waits(5);
    waiter.join();
    CHECK(pad.word(5)->load() == kEndsWaits);
    CHECK(pad.load(4) == 0 && pad.load(6) == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(pad.word(8)) ==
          reinterpret_cast<std::uintptr_t>(memory) + SignalPad::bytes(0) + 8 * sizeof(Word));
    ::munmap(memory, nbytes);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv);
}
