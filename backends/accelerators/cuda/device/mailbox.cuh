// Lamport exchange, called mail here: every word itself shows that it has arrived, so that neither a fence
// nor a flag has to follow it.
//
// A word of the mail area that is zero has not arrived. Senders therefore write +0 as -0: a word that would
// be zero (a float, or a pair of 16-bit floats) gets its highest bit set, which changes no sum that starts
// from +0. Every 32-bit word is checked by itself, so no order is needed, and a store of 16 bytes may be
// torn.
//
// Reuse. The reader of a word writes zero back at once, and each word that is sent in a call is read in that
// call: between calls the area is all zeros, as workspaces are when they are new. Nothing else is ever
// written there. Calls of even and of odd epochs have areas of their own: a rank that sends in call e has
// received mail of every peer in call e - 1 (these calls are brief, device/call.cuh), so the peer's call
// e - 2 was over, and the zeros that the mail of e overwrites had been written. Grids guarantee that the zeros
// come first everywhere, since a call is one grid and nothing of it is sent before the previous grid has
// completed: a grid's stores to its own device's memory have then been performed in that device's L2, which
// is where all processors, those of peers too, meet for it. So the peer's zeros of e - 2 are there before its
// mail of e - 1 leaves, and this rank has looked at that mail before its own of e leaves. PTX's rules alone,
// which define no order between devices without fences, do not guarantee it; a fence of all sending threads
// would, and costs 2 to 5 us a call. Given that order, the exchange is tried in every interleaving
// (tests/native/model/test_words_model.cpp).
//
// This is argued for compute capability 9.0 and peers on NVLink alone. The kernels compile for other devices too
// (ptx/since_hopper.cuh), for which three things are neither argued nor tried:
//   - that the end of a grid has put its stores to its own device's memory where the stores of peers meet them, on a
//     device of two dies (10.0), and on one that peers reach through PCIe alone (8.6, 8.9, 12.0);
//   - that PCIe tears a store of 16 bytes between 32-bit words only;
//   - that nothing is sent before the previous grid has completed: code for devices before 9.0 does not wait for that
//     grid, and relies on a launch that does not start early (cuda::since_hopper).
// Exchanges by flags (collectives.hpp) fence, and need none of the three.
//
// A call may have two exchanges, where the data of the second one depends on the first. They are one grid and
// one epoch, with places of their own in the same area, so nothing above changes: all of it is mail of e, on
// zeros of e - 2. (An epoch each in one grid would not do. The peer's second mail leaves when some of its
// threads have taken their first mail; no end of a grid would then lie between the zeros that its other
// threads have still to write and the next call, whose mail overwrites them.) Where few ranks own what is
// summed, the other ranks learn of each other through an owner: it sends sums only of what it has looked at,
// and it has looked at mail of every rank. All this, and what would go wrong with an epoch each, is tried
// there too.
#pragma once

#include <cstdint>

#include "backends/transport/device_wait.cuh"

namespace mkernel::cuda::mailbox {

__device__ inline std::uint32_t mailable(std::uint32_t word) {
    return word == 0 ? 0x80000000u : word;
}

__device__ inline uint4 mailable(uint4 words) {
    return {mailable(words.x), mailable(words.y), mailable(words.z), mailable(words.w)};
}

// Sends `words`, which are mailable, to `to`: an address in a peer's mail area, a multiple of 16.
__device__ inline void send(char* to, uint4 words) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}

// Returns what is at a place of the own mail area now.
__device__ inline uint4 look(const char* at) {
    uint4 words;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(at)
                 : "memory");
    return words;
}

__device__ inline bool is_all(uint4 words) {
    return words.x != 0 && words.y != 0 && words.z != 0 && words.w != 0;
}

// Clears a place after all of its mail has arrived, for the call after the next.
__device__ inline void clear(char* at) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(0)
                 : "memory");
}

// Waits until `come()`, which looks at mail, is true; returns whether it was before the limit.
template <class Come>
__device__ inline bool until(Come&& come, const transport::DeviceWaiter& waiter,
                             transport::Awaited what) {
    constexpr int kEager =
        64;  // polls without a pause: what is under way comes in one or two microseconds
    constexpr int kPauseNs = 32;
    constexpr int kPollsBetweenAsking = 128;
#pragma unroll 1
    for (int turn = 0; turn < kEager; ++turn) {
        if (come()) return true;
    }
    const std::uint64_t start = transport::global_ns();
    std::uint64_t next = start;
#pragma unroll 1
    for (int turn = 1; !come(); ++turn) {
        __nanosleep(kPauseNs);
        if (turn % kPollsBetweenAsking == 0 && (next = waiter.ask(start, next, what)) == 0) {
            return false;
        }
    }
    return true;
}

// Takes all mail at these places of the own mail area: returns true when it has arrived, with the mail in
// `words` and the places cleared. A null `at` stands for no place. Called by any number of threads, each for
// places of its own.
template <int kPlaces>
__device__ inline bool take(char* const (&at)[kPlaces], uint4 (&words)[kPlaces],
                            const transport::DeviceWaiter& waiter, transport::Awaited what) {
    const auto come = [&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
            if (at[i] != nullptr) words[i] = look(at[i]);
        }
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) all = all && (at[i] == nullptr || is_all(words[i]));
        return all;
    };
    if (!until(come, waiter, what)) return false;
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
        if (at[i] != nullptr) clear(at[i]);
    }
    return true;
}

// 16 bytes of any bits. A byte that follows the same rules travels beside them and marks which words are
// zero.
struct Exact {
    static constexpr std::uint32_t kCome = 0x80;

    char* words;  // a multiple of 16
    char* zeros;
};

__device__ inline void send_exactly(const Exact& to, uint4 words) {
    send(to.words, mailable(words));
    const std::uint32_t zeros = (words.x == 0 ? 1 : 0) | (words.y == 0 ? 2 : 0) |
                                (words.z == 0 ? 4 : 0) | (words.w == 0 ? 8 : 0);
    asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(to.zeros), "r"(Exact::kCome | zeros)
                 : "memory");
}

// Takes exact mail, as `take` does.
__device__ inline bool take_exactly(const Exact& at, uint4& words,
                                    const transport::DeviceWaiter& waiter,
                                    transport::Awaited what) {
    std::uint32_t zeros = 0;
    const auto come = [&] {
        words = look(at.words);
        asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(zeros) : "l"(at.zeros) : "memory");
        return zeros != 0 && is_all(words);
    };
    if (!until(come, waiter, what)) return false;
    clear(at.words);
    asm volatile("st.relaxed.sys.global.u8 [%0], %1;" ::"l"(at.zeros), "r"(0) : "memory");
    if ((zeros & 1) != 0) words.x = 0;
    if ((zeros & 2) != 0) words.y = 0;
    if ((zeros & 4) != 0) words.z = 0;
    if ((zeros & 8) != 0) words.w = 0;
    return true;
}

// Returns 16 bytes of pairs of rounded 16-bit floats, made sendable. No bit of them may change on the way,
// where all ones, a pair of NaNs, stand for zero. Rounding makes NaNs of another kind; `sendable` replaces a
// word of all ones by a pair of that kind, and is applied before everything that is stored.
__device__ inline uint4 sendable(uint4 words) {
    const auto one = [](std::uint32_t word) { return word == 0xFFFFFFFFu ? 0x7FFF7FFFu : word; };
    return {one(words.x), one(words.y), one(words.z), one(words.w)};
}

// Sends `words`, which are sendable.
__device__ inline void send_rounded(char* to, uint4 words) {
    const auto one = [](std::uint32_t word) { return word == 0 ? 0xFFFFFFFFu : word; };
    send(to, {one(words.x), one(words.y), one(words.z), one(words.w)});
}

// Takes rounded mail, as `take` does.
template <int kPlaces>
__device__ inline bool take_rounded(char* const (&at)[kPlaces], uint4 (&words)[kPlaces],
                                    const transport::DeviceWaiter& waiter,
                                    transport::Awaited what) {
    if (!take(at, words, waiter, what)) return false;
    const auto one = [](std::uint32_t word) { return word == 0xFFFFFFFFu ? 0 : word; };
#pragma unroll
    for (uint4& each : words) each = {one(each.x), one(each.y), one(each.z), one(each.w)};
    return true;
}

}  // namespace mkernel::cuda::mailbox
