// Words that the host raises, for a whole grid to wait for. Host code and CUDA; on a host it is what tests
// run.
//
// The proxy raises words of the signal pad, which lie in pinned host memory. A load of those takes a round
// trip over PCIe, and many threads that poll them hold up everything else on that link (measured: 132 x
// 1024 pollers make a copy engine's small copies a thousand times slower). So one thread of a running grid
// polls them, and *republishes* them in memory of the device, where all others wait.
//
// ORDER. Each load is an acquire of the host's release, each store a release to the device's waiters, and
// releases are cumulative: whoever sees a word here sees what the host saw before it raised it.
// A copy has one writer, and words only grow, so a copy is never ahead of its word and never falls back.
#pragma once

#include <cstdint>

#include "backends/transport/fifo_atomics.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::transport {

// A run of a pad's words, and their copies.
struct Republished {
    const Word* words = nullptr;  // pinned host memory, as the device addresses it
    SetWord* copies = nullptr;    // device memory
    std::uint32_t count = 0;
};

namespace detail {

// kWords of them from `first` on, whose loads are under way together.
template <int kWords>
MKERNEL_HOST_DEVICE void republish_some(const Republished& run, std::uint32_t first) {
    std::uint64_t word[kWords];
    std::uint64_t copy[kWords];
    for (int i = 0; i < kWords; ++i) {
        if (first + i >= run.count) continue;
#ifdef __CUDA_ARCH__
        word[i] = run.words[first + i].peek();  // the fence below makes it an acquire
#else
        word[i] = run.words[first + i].load();
#endif
    }
    for (int i = 0; i < kWords; ++i) {
        if (first + i < run.count) copy[i] = run.copies[first + i].peek();
    }
    [[maybe_unused]] bool fenced = false;
    for (int i = 0; i < kWords; ++i) {
        if (first + i >= run.count || word[i] == copy[i]) continue;
#ifdef __CUDA_ARCH__
        if (!fenced) fence_system();
        fenced = true;
        run.copies[first + i].set_fenced(word[i]);
#else
        run.copies[first + i].set(word[i]);
#endif
    }
}

}  // namespace detail

// By one thread of a grid, until `stop` (device memory, which another thread of the grid stores to, once no
// wait is left) is not 0: ok. aborted: the abort word was set. timed_out: the deadline passed.
MKERNEL_HOST_DEVICE inline WaitResult republish(const Republished& run, const std::uint32_t* stop,
                                                const DeviceLimits& limits) {
    constexpr int kTogether = 8;
    constexpr int kRoundsBetweenLooks = 16;
    const std::uint64_t start = near::now_ns();
    while (true) {
        for (int round = 0; round < kRoundsBetweenLooks; ++round) {
            if (load_relaxed(stop) != 0) return WaitResult::ok;
            for (std::uint32_t first = 0; first < run.count; first += kTogether) {
                detail::republish_some<kTogether>(run, first);
            }
#ifndef __CUDA_ARCH__
            near::pause();  // there a load takes no round trip
#endif
        }
        if (load_relaxed(limits.abort) != 0) return WaitResult::aborted;
        if (near::now_ns() - start > limits.timeout_ns) return WaitResult::timed_out;
    }
}

}  // namespace mkernel::transport
