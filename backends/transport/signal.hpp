// A signal: a 64-bit word by which one processor notifies another that something is done. It lies in any
// memory that both reach: symmetric memory of a host or a GPU, pinned memory.
//
// A word starts at 0 and only grows, so nothing is ever cleared and a wait is for `>= wanted`. It is of
// one kind for life, whichever plans use it one after another:
//
//   SetWord    has one writer, who sets it to a number that is larger in every call: the epoch, which is
//              the number of the call, or message_number(call, message) where a call has several.
//   AddedWord  has any number of writers, each of which adds. The sum of additions before a call is kept
//              by the rank that waits, in an ExpectedCount beside the word.
//
// A wait ends when the word has come (`ok`), when the abort word of the rank was set (`aborted`), or at its
// deadline (`timed_out`), after writing the rank's one diagnosis (diagnosis.hpp). There is no wait without a
// deadline. SignalPad::wait is the wait of a host's threads, which sleep; DeviceWaiter (device_wait.cuh) that
// of a GPU's, which poll.
//
// MEMORY ORDER. A writer completes its data, then sets or adds (release); a waiter that sees the word reached
// (acquire) sees the data.
//   Set: the value that was read is of this call or, from a fast writer, of a later one; as one thread
//   after another of the one writer stored it, everything that came before the earlier store came before
//   the later one.
//   Added: each addition is an atomic read-modify-write, so the additions after a writer's own belong to its
//   release sequence: a reader of a sum sees the data of all writers that are counted in it. A plain store
//   would end that sequence and lose additions that are under way, hence one kind for life.
// Data that a writer itself has acquired before (of its block's threads through a barrier, of other ranks
// through their words) is visible as well: releases are cumulative. Data moved by bulk copies or by a copy
// engine is ordered before the word by its mover.
//
// REUSE. Calls of a world run one after another, in the same order on every rank; each is an eager launch
// or part of a captured graph that is replayed, of any of the plans. Therefore no number that a call waits
// for may come from the host at launch: the epoch and the expected counts lie in memory of the rank's device,
// the call reads them there, and its last block moves them on when all its blocks have read them.
//   Set: every earlier call set less than this epoch, so none of them can satisfy a wait `>= epoch`.
//   All ranks count all calls of the world, therefore they agree on the epoch whatever the plans were.
//   Added: before the call, the word's additions of all earlier calls sum up to `value`, by induction:
//   both start at 0, and every call adds to the word what its plan defines and moves `value` on by just that.
//   A wait for the first n additions of this call is a wait for `value + n`. Only additions of a later call
//   could satisfy it instead. A word with one writer is safe from them, since the writer makes this call's
//   additions first. Where a word has several writers, none adds for a call before the call that used the
//   word last is over for the rank that waits; the code that ends calls guarantees that (Hopper:
//   device/call.cuh, but for its brief calls, which have set words only; Ascend: kernels/call.hpp, where calls
//   of even and of odd epoch use words of their own). A count that was not moved on lets the next wait pass
//   too early; one that moved too far lets it time out.
//
// Both orders, the waits, and that calls which end as they do may use memory again, are tried in every
// interleaving (tests/native/model: test_words_model, test_call_end_model, test_ascend_model).
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"

namespace mkernel::transport {

enum class WaitResult : std::uint32_t { ok = 0, aborted = 1, timed_out = 2 };

// The reading side of a word of either kind.
struct Word {
    std::uint64_t value = 0;

    // Loads the value. Acquire.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint64_t load() const { return load_acquire(&value); }
    // Loads the value for polls. Relaxed: nothing may be read on the strength of it before `reached`.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint64_t peek() const { return load_relaxed(&value); }
    // Returns true once the word is at `wanted`. Acquire.
    [[nodiscard]] MKERNEL_HOST_DEVICE bool reached(std::uint64_t wanted) const {
        return load() >= wanted;
    }
};

struct SetWord : Word {
    // Sets the word, by its one writer, to no less than it is. Release.
    MKERNEL_HOST_DEVICE void set(std::uint64_t to) { store_release(&value, to); }
#ifdef __CUDACC__
    // Sets the word after a fence_system of this thread, which several words may share.
    __device__ void set_fenced(std::uint64_t to) { store_relaxed(&value, to); }
#endif
};

struct AddedWord : Word {
    // Adds, by any writer. Release.
    MKERNEL_HOST_DEVICE void add(std::uint64_t count) { add_release(&value, count); }
    // Adds in the same way; returns the value after it.
    MKERNEL_HOST_DEVICE std::uint64_t add_and_fetch(std::uint64_t count) {
        return fetch_add_release(&value, count) + count;
    }
};

// The value of an added word before the running call. It is the waiting rank's own, in memory of its device;
// constant during a call.
struct ExpectedCount {
    std::uint64_t value = 0;

    // Returns the value to wait for: after the first `additions` of this call.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint64_t after(std::uint64_t additions) const {
        return value + additions;
    }
    // Moves the count on by all that the call adds to the word. Called by the call's last block, once.
    MKERNEL_HOST_DEVICE void move_on(std::uint64_t additions) { value += additions; }
};

static_assert(sizeof(SetWord) == 8 && sizeof(AddedWord) == 8 && sizeof(ExpectedCount) == 8);

// A set word has the number of a call's messages in so many low bits, and the number of the call above.
inline constexpr int kMessageBits = 20;

// Returns the value of a set word once message `message` of call `call` is there; message 0: the call is
// open.
MKERNEL_HOST_DEVICE constexpr std::uint64_t message_number(std::uint64_t call,
                                                           std::uint64_t message) {
    return (call << kMessageBits) + message;
}

// A set word of this value ends every wait for it, also a wait that compares signed differences: no call
// comes to such a number.
inline constexpr std::uint64_t kEndsWaits = std::uint64_t{1} << 62;

}  // namespace mkernel::transport
