// In place of Hopper's: what the end of a call touches of a workspace, in memory of the host.
#pragma once

#include <array>
#include <cstdint>

#include "backends/transport/call_state.hpp"
#include "backends/transport/device_wait.cuh"
#include "backends/transport/signal.hpp"

namespace mkernel::cuda {

inline constexpr int kMaxRanks = 2;
inline constexpr std::uint32_t kCompletedWord = kMaxRanks;

struct Control {
    transport::CallState state{.epoch = 1, .blocks_done = 0, .failed = 0};
    std::array<std::uint64_t, 1> epochs{1};
    std::array<transport::SetWord, kMaxRanks> finished, started;
    std::array<transport::AddedWord, kMaxRanks> words;  // of the pad, which NICs add to
    std::array<transport::ExpectedCount, kMaxRanks> expected;
    std::array<transport::SetWord, 2 * kMaxRanks> flags;
};

// NICs that keep order, as words that are added to.
struct Network {
    std::array<Control*, kMaxRanks> controls{};
    int rank = 0;
    bool ordered = true;

    bool put(const transport::DeviceWaiter&, int peer, std::uint32_t word) const {
        controls[peer]->words[word].add(1);
        return true;
    }
    bool ask_completion(const transport::DeviceWaiter&) const { return true; }
    bool wait(const transport::DeviceWaiter& waiter, std::uint32_t word) const {
        Control& own = *controls[rank];
        if (!waiter.until(own.words[word], own.expected[word].after(1), {})) return false;
        own.expected[word].move_on(1);
        return true;
    }
};

struct Workspace {
    std::array<Control*, kMaxRanks> controls{};
    std::int32_t rank = 0, world = kMaxRanks;
    bool one_node = true;
    Network network;

    [[nodiscard]] bool near(int other) const { return one_node || other == rank; }
    [[nodiscard]] int far() const { return one_node ? 0 : world - 1; }
    [[nodiscard]] int far_rank(int number) const { return (rank + 1 + number) % world; }
    [[nodiscard]] Control& control(int of) const { return *controls[of]; }
    [[nodiscard]] Control& control() const { return control(rank); }
    [[nodiscard]] transport::SetWord* flags(int of) const { return controls[of]->flags.data(); }
};

}  // namespace mkernel::cuda
