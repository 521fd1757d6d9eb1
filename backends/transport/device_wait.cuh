// The one way in which a kernel on a GPU waits for a word: of another GPU, a copy engine or a proxy.
//
// `DeviceWaiter::until` returns true once the word has reached `wanted` (an acquire, see signal.hpp; bulk
// loads of what its writer wrote need their own fence in between). It returns false when the call must be
// given up: the host set the abort word, another wait of this rank failed, or the deadline passed. The
// first time-out of a rank writes the diagnosis, published by `code`, into pinned memory of the host.
// Nothing traps: kernels skip the work that they waited to do, run to their end, and the context stays
// usable.
//
// Any thread may wait; one thread of a warp at a time is enough and cheapest.
#pragma once

#include "backends/transport/call_state.hpp"
#include "backends/transport/clock.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/host_control.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::transport {

// The awaited word, for the diagnosis. `signal`: the word's index where it has one.
struct Awaited {
    std::uint32_t signal;
    std::uint32_t peer;
    std::uint32_t chunk;
};
inline constexpr std::uint32_t kControlWord = 0xFFFFFFFFu;
inline constexpr std::uint32_t kFullFifo = 0xFFFFFFFEu;  // no word: a slot of the command FIFO
inline constexpr std::uint32_t kMail = 0xFFFFFFFDu;  // no word: data that says itself that it came
inline constexpr std::uint32_t kOwnBlocks =
    0xFFFFFFFCu;  // a word of the call that its kernel raises
inline constexpr std::uint32_t kNoChunk = 0xFFFFFFFFu;

class DeviceWaiter {
  public:
    // `state`: the rank's, in memory of its device.
    __device__ DeviceWaiter(CallState& state, const WaitLimits& limits, Waiter kernel)
        : state_(&state), limits_(limits), kernel_(kernel) {}

    __device__ bool until(const Word& word, std::uint64_t wanted, Awaited what) const {
        if (word.reached(wanted)) return true;
        return poll(state_, limits_, kernel_, &word, wanted, what);
    }

    // Returns the limits of a wait that is not for one word: that of a push, or for many words.
    __device__ DeviceLimits limits() const {
        return {&limits_.host->abort, limits_.timeout_ns, &state_->failed};
    }

    // Returns, after such a wait, whether the call goes on. Otherwise all other waits of this rank are given
    // up too, and the first time-out is recorded, with `seen` of `wanted` as the waiter saw them.
    __device__ bool went_on(WaitResult result, std::uint64_t seen, std::uint64_t wanted,
                            Awaited what) const {
        if (result == WaitResult::ok) return true;
        if (state_->give_up(result == WaitResult::timed_out)) {
            record(limits_, kernel_, seen, wanted, what);
        }
        return false;
    }

    // Checks, for waits that poll by themselves, once in a while. Returns the time of the next check at the
    // earliest, or 0 where the call is given up. `start`: when the wait began (`global_ns`); `next`: the
    // previous return value, or `start`.
    __device__ std::uint64_t ask(std::uint64_t start, std::uint64_t next, Awaited what) const {
        return ask(state_, limits_, kernel_, start, next, what);
    }

  private:
    // Many blocks may wait at a time, and the copy engines that they wait for fetch their commands
    // over the same PCIe link as the abort word: polls pause, and looks at the host are rare.
    static constexpr int kPauseNs = 64;
    static constexpr int kPollsBetweenLooks = 64;
    static constexpr std::uint64_t kHostLookNs = 1'000'000;

    // Not inlined, since it is long and rare; with its arguments by value, so that they stay in
    // registers.
    __device__ static __noinline__ bool poll(CallState* state, WaitLimits limits, Waiter kernel,
                                             const Word* word, std::uint64_t wanted, Awaited what) {
        const std::uint64_t start = global_ns();
        std::uint64_t look = start + kHostLookNs;
        while (true) {
            for (int turn = 0; turn < kPollsBetweenLooks; ++turn) {
                if (word->peek() >= wanted) return word->reached(wanted);
                __nanosleep(kPauseNs);
            }
            if (load_relaxed(&state->failed) != 0) return false;
            const std::uint64_t now = global_ns();
            if (now < look) continue;
            look = now + kHostLookNs;
            if (load_relaxed(&limits.host->abort) != 0) {
                state->give_up(false);
                return false;
            }
            if (now - start > limits.timeout_ns) {
                if (state->give_up(true)) record(limits, kernel, word->peek(), wanted, what);
                return false;
            }
        }
    }

    // Not inlined, for the same reasons.
    __device__ static __noinline__ std::uint64_t ask(CallState* state, WaitLimits limits,
                                                     Waiter kernel, std::uint64_t start,
                                                     std::uint64_t next, Awaited what) {
        if (load_relaxed(&state->failed) != 0) return 0;
        const std::uint64_t now = global_ns();
        if (now - start > limits.timeout_ns) {
            if (state->give_up(true)) record(limits, kernel, 0, 1, what);
            return 0;
        }
        if (now < next + kHostLookNs) return next;
        if (load_relaxed(&limits.host->abort) == 0) return now;
        state->give_up(false);
        return 0;
    }

    __device__ static void record(const WaitLimits& limits, Waiter kernel, std::uint64_t seen,
                                  std::uint64_t wanted, Awaited what) {
        AbortRecord& record = limits.host->record;
        Diagnosis& who = record.diagnosis;
        who.waiter = kernel;
        who.core = blockIdx.x;
        who.signal = what.signal;
        who.peer = what.peer;
        who.chunk = what.chunk;
        who.op = limits.call;
        who.seen = seen;
        who.wanted = wanted;
        store_release(&record.code, static_cast<std::uint32_t>(AbortCode::timeout));
    }

    CallState* state_;
    WaitLimits limits_;
    Waiter kernel_;
};

}  // namespace mkernel::transport
