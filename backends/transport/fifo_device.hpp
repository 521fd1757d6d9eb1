// The device side of the command FIFO: how a kernel asks its host proxy thread for a put.
//
// A slot is 64 bytes and is published by its last word, a release store that carries the lap's
// parity in bit 63 (the *commit bit*); the first 56 bytes are plain stores before it. A slot of lap
// L holds a fresh command exactly when its commit bit equals parity(L) = (L + 1) & 1, so nothing
// is cleared between laps and zeroed memory is an empty ring.
// (On a GPU the last 16 bytes go out as one st.release.sys.v2.b64; the layout is made for that.)
//
// push: any number of producers, lock-free; when the ring is full it waits for the proxy
// (back-pressure, nothing is lost) until the deadline or an abort. A ticket is taken only when its
// slot is free, so a producer that gives up leaves no hole for the proxy to wait on. Commands of
// one producer are executed in the order of its pushes. It is inline: kernels live in other
// libraries.
//
// Waking: the proxy sleeps in ppoll on `wake_fd` (an eventfd) beside the NIC's own descriptors; the
// first producer that sees `sleeping` set clears it and writes the eventfd. A producer that cannot
// make system calls (a GPU) is seen all the same: the proxy's sleep is bounded.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <climits>
#include <cstdint>

#include "backends/transport/put_command.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::transport {

struct alignas(64) FifoSlot {
    PutCommand command;
    std::uint64_t reserved[2];
    std::uint64_t commit;  // bit 63: lap parity; the rest: the slot's ticket, for diagnosis
};
static_assert(sizeof(FifoSlot) == 64);
static_assert(std::endian::native == std::endian::little, "the futex lies on the low half of tail");

// Plain handle, passed to kernels by value or by address. The memory belongs to `Fifo` (fifo.hpp).
struct FifoDevice {
    FifoSlot* slots = nullptr;
    std::uint64_t* head = nullptr;      // next ticket; producers advance it by compare-and-swap
    std::uint64_t* tail = nullptr;      // first ticket not yet drained; the proxy stores
    std::uint32_t* waiting = nullptr;   // producers asleep because the ring is full
    std::uint32_t* sleeping = nullptr;  // 1 while the proxy sleeps and nobody has woken it yet
    std::uint64_t capacity = 0;         // slots, a power of two
    int wake_fd = -1;                   // eventfd that ends the proxy's sleep

    static constexpr std::uint64_t kCommitBit = std::uint64_t{1} << 63;
    static constexpr std::uint64_t commit_word(std::uint64_t ticket, std::uint64_t capacity) {
        const std::uint64_t parity = (ticket / capacity + 1) & 1;
        return (parity << 63) | (ticket & ~kCommitBit);
    }

    // Returns ok, or why the command was not queued. `pad` supplies the abort word and takes the
    // diagnosis at the deadline (monotonic_ns clock).
    WaitResult push(const PutCommand& command, const SignalPad& pad, std::uint64_t deadline_ns,
                    Diagnosis who) const {
        if (pad.aborted() != AbortCode::none) return WaitResult::aborted;
        const std::atomic_ref<std::uint64_t> next(*head);
        const std::atomic_ref<std::uint64_t> drained(*tail);
        std::uint64_t ticket = next.load(std::memory_order_relaxed);
        while (true) {
            if (ticket - drained.load(std::memory_order_acquire) < capacity) {
                if (next.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed))
                    break;
                continue;
            }
            const WaitResult result = wait_for_space(pad, deadline_ns, who);
            if (result != WaitResult::ok) return result;
            ticket = next.load(std::memory_order_relaxed);
        }
        FifoSlot& slot = slots[ticket & (capacity - 1)];
        slot.command = command;
        // seq_cst, not only release: it must be ordered before the look at `sleeping` (the proxy
        // stores `sleeping`, then looks at the slot; one of the two sees the other).
        std::atomic_ref(slot.commit)
            .store(commit_word(ticket, capacity), std::memory_order_seq_cst);
        wake();
        return WaitResult::ok;
    }

    // Ends the proxy's sleep, if it sleeps. Any thread of this process.
    void wake() const {
        const std::atomic_ref<std::uint32_t> asleep(*sleeping);
        if (asleep.load(std::memory_order_seq_cst) == 0) return;
        if (asleep.exchange(0, std::memory_order_acq_rel) == 0) return;
        const std::uint64_t one = 1;
        // Fails only when the counter is full: then the proxy is awake already.
        [[maybe_unused]] const ssize_t written = ::write(wake_fd, &one, sizeof(one));
    }

  private:
    WaitResult wait_for_space(const SignalPad& pad, std::uint64_t deadline_ns,
                              Diagnosis who) const {
        const std::atomic_ref<std::uint64_t> next(*head);
        const std::atomic_ref<std::uint64_t> drained(*tail);
        const std::atomic_ref<std::uint32_t> sleepers(*waiting);
        while (true) {
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            const std::uint64_t seen = drained.load(std::memory_order_seq_cst);
            const bool full = next.load(std::memory_order_relaxed) - seen >= capacity;
            const auto code = pad.aborted();
            const std::uint64_t now = monotonic_ns();
            const bool sleep = full && code == AbortCode::none && now < deadline_ns;
            if (sleep) {
                const std::uint64_t left = deadline_ns - now;
                const std::uint64_t pause =
                    left < SignalPad::kMaxSleepNs ? left : SignalPad::kMaxSleepNs;
                const timespec limit{0, static_cast<long>(pause)};
                syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(tail), FUTEX_WAIT_PRIVATE,
                        static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
            }
            sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (sleep) continue;
            if (!full) return WaitResult::ok;
            if (code != AbortCode::none) return WaitResult::aborted;
            who.seen = seen;
            who.wanted = seen + 1;
            pad.abort(AbortCode::timeout, who);
            return WaitResult::timed_out;
        }
    }
};

}  // namespace mkernel::transport
