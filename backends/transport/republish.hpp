// Words that the host raises and a whole grid waits for. Host code and CUDA; tests run it on a host.
//
// The proxy adds to words of the signal pad, which lie in pinned host memory. A load of those takes a round
// trip over PCIe, and many threads that poll them hold up everything else on that link (measured: 132 x
// 1024 pollers make a copy engine's small copies a thousand times slower). One warp of a running grid
// therefore polls them, in each lane's share the first few that have not come, with pauses, and *republishes*
// them in memory of the device, where all others wait: an added word of the host becomes a set word of the
// device, which holds the number of the call.
//
// ORDER. Each load is an acquire of the host's release, each store a release to the device's waiters, and
// releases are cumulative: a thread that sees a copy set sees everything that the host saw before it raised
// the word. A call adds 1 to each word of a run, and the thread that republishes it moves the word's expected
// count on by that; no other thread reads the count.
#pragma once

#include <cstdint>

#include "backends/transport/fifo_atomics.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::transport {

// The pattern of a run's words: `count` of them, `width` in a row every `stride` words. From item `gap_at` on
// they lie `gap` words further.
struct WordPattern {
    std::uint32_t count = 0;
    std::uint32_t gap_at = 0;
    std::uint32_t gap = 0;
    std::uint32_t width = 1;
    std::uint32_t stride = 1;

    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t index(std::uint32_t item) const {
        return item / width * stride + item % width + (item < gap_at ? 0 : gap);
    }
};

// A run of a pad's added words, with the expected count and the copy of each, and the pattern of the words.
struct Republished {
    const Word* words = nullptr;        // pinned host memory, as the device addresses it
    ExpectedCount* expected = nullptr;  // device memory, as the copies
    SetWord* copies = nullptr;
    WordPattern which;
};

// The threads that share the work on a run: the `lane`th of `lanes`.
struct Lane {
    std::uint32_t lane = 0;
    std::uint32_t lanes = 1;
};

namespace detail {

// Republishes kItems of a lane from `first` on, whose loads are under way together. Returns whether all have
// come.
template <int kItems>
MKERNEL_HOST_DEVICE bool republish_some(const Republished& run, std::uint64_t number,
                                        std::uint32_t first, std::uint32_t stride) {
    bool pending[kItems];
    std::uint64_t word[kItems];
    bool all = true;
    for (int i = 0; i < kItems; ++i) {
        const std::uint32_t item = first + i * stride;
        pending[i] = item < run.which.count && run.copies[run.which.index(item)].peek() < number;
    }
    for (int i = 0; i < kItems; ++i) {
        if (!pending[i]) continue;
        const Word& at = run.words[run.which.index(first + i * stride)];
#ifdef __CUDA_ARCH__
        word[i] = at.peek();  // the fence below makes it an acquire
#else
        word[i] = at.load();
#endif
    }
    [[maybe_unused]] bool fenced = false;
    for (int i = 0; i < kItems; ++i) {
        if (!pending[i]) continue;
        const std::uint32_t index = run.which.index(first + i * stride);
        if (word[i] < run.expected[index].after(1)) {
            all = false;
            continue;
        }
        run.expected[index].move_on(1);
#ifdef __CUDA_ARCH__
        if (!fenced) fence_system();
        fenced = true;
        run.copies[index].set_fenced(number);
#else
        run.copies[index].set(number);
#endif
    }
    return all;
}

}  // namespace detail

// Sets each copy of the lane's share to `number`, which all copies are below, as its word has its one
// addition of this call. Returns ok: all of them have; aborted, timed_out: by the limits; `first_missing`
// then returns what was waited for.
MKERNEL_HOST_DEVICE inline WaitResult republish(const Republished& run, std::uint64_t number,
                                                const DeviceLimits& limits, Lane mine = {}) {
#ifdef __CUDA_ARCH__
    constexpr int kTogether = 2;
#else
    constexpr int kTogether = 1;  // there a load takes no round trip
#endif
    constexpr int kRoundsBetweenLooks = 16;
    const std::uint64_t start = near::now_ns();
    std::uint32_t first = mine.lane;  // of those that are polled
    while (true) {
        for (int round = 0; round < kRoundsBetweenLooks;) {
            if (first >= run.which.count) return WaitResult::ok;
            if (detail::republish_some<kTogether>(run, number, first, mine.lanes)) {
                first += kTogether * mine.lanes;
            } else {
                near::pause();
                ++round;
            }
        }
        if (limits.aborted()) return WaitResult::aborted;
        if (near::now_ns() - start > limits.timeout_ns) return WaitResult::timed_out;
    }
}

// Returns the index of the first word of the lane's share whose copy is not at `number`; where all are, one
// that is none of the run's.
MKERNEL_HOST_DEVICE inline std::uint32_t first_missing(const Republished& run, std::uint64_t number,
                                                       Lane mine = {}) {
    const WordPattern& which = run.which;
    for (std::uint32_t item = mine.lane; item < which.count; item += mine.lanes) {
        if (run.copies[which.index(item)].peek() < number) return which.index(item);
    }
    return which.index(which.count);
}

}  // namespace mkernel::transport
