// The thread that hands batches to the driver: order, waiting, errors, sleep.
#include "backends/accelerators/cuda/submitter.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/nics/check.hpp"

using mkernel::cuda::Submitter;
using std::chrono::milliseconds;

namespace {

void await(const std::atomic<int>& count, int wanted) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (count.load() != wanted && std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
    }
    CHECK(count.load() == wanted);
}

TEST(batches_are_submitted_in_order) {
    std::vector<int> seen;
    std::atomic<int> submitted{0};
    Submitter<int> submitter([&](int& batch) {
        if (batch % 100 == 0) std::this_thread::sleep_for(milliseconds(1));
        seen.push_back(batch);
        ++submitted;
    });
    for (int batch = 0; batch < 1000; ++batch) submitter.give(batch);
    await(submitted, 1000);
    for (int batch = 0; batch < 1000; ++batch) CHECK(seen[batch] == batch);
}

TEST(who_gives_does_not_wait) {
    std::atomic<bool> goes_on{false};
    std::atomic<int> submitted{0};
    Submitter<int> submitter([&](int&) {
        while (!goes_on.load()) std::this_thread::yield();
        ++submitted;
    });
    for (int batch = 0; batch < 10; ++batch) submitter.give(batch);
    CHECK(submitted.load() == 0);
    goes_on.store(true);
    await(submitted, 10);
}

TEST(a_thread_that_sleeps_is_woken) {
    std::atomic<int> submitted{0};
    Submitter<int> submitter([&](int&) { ++submitted; });
    for (int round = 1; round <= 20; ++round) {
        std::this_thread::sleep_for(milliseconds(3));
        submitter.give(round);
        await(submitted, round);
    }
}

TEST(an_error_is_told_and_nothing_follows_it) {
    std::vector<int> seen;
    Submitter<int> submitter([&](int& batch) {
        seen.push_back(batch);
        if (batch == 3) throw std::runtime_error("no such stream");
    });
    submitter.check();
    for (int batch = 0; batch < 6; ++batch) submitter.give(batch);
    std::string told;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (told.empty() && std::chrono::steady_clock::now() < until) {
        try {
            submitter.check();
        } catch (const std::runtime_error& error) {
            told = error.what();
        }
    }
    CHECK(told == "no such stream");
    submitter.give(6);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK((seen == std::vector{0, 1, 2, 3}));
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
