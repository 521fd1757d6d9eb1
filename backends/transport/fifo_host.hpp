// The host side of the command FIFO, to which threads of the host push: simulated kernels, plug-ins, the
// session itself. See fifo_slot.hpp for the slots.
//
// push: any number of producers, lock-free; when the ring is full it waits for the proxy
// (back-pressure, nothing is lost) until the deadline or an abort. A ticket is taken only when its
// slot is free, so a producer that gives up leaves no hole for the proxy to wait on. Commands of
// one producer are executed in the order of its pushes. It is inline: kernels live in other
// libraries.
//
// Waking: the proxy sleeps in ppoll on `wake_fd` (an eventfd) beside the NIC's own descriptors; the
// first producer that sees `sleeping` set clears it and writes the eventfd.
#pragma once

#include <bit>
#include <cstdint>

#include "backends/transport/fifo_slot.hpp"
#include "backends/transport/put_command.hpp"
#include "backends/transport/shared_word.hpp"
#include "backends/transport/signal_pad.hpp"
#include "backends/transport/sleep.hpp"

namespace mkernel::transport {

static_assert(std::endian::native == std::endian::little, "the futex lies on the low half of tail");

// The other ring of a FIFO, whose producers are a device's (fifo_device.hpp).
struct FifoDeviceRing {
    FifoRingMemory memory;
    std::uint32_t* claimed = nullptr;  // 1 while a device may push, which cannot wake the proxy
    std::uint64_t* awaited = nullptr;  // goes up when the host has queued what will push
};

// Plain handle, passed to kernels by address. The memory belongs to `Fifo` (fifo.hpp).
struct FifoHandle {
    FifoSlot* slots = nullptr;
    std::uint64_t* head = nullptr;      // next ticket; producers advance it by compare-and-swap
    std::uint64_t* tail = nullptr;      // first ticket not yet drained; the proxy stores
    std::uint32_t* waiting = nullptr;   // producers asleep because the ring is full
    std::uint32_t* sleeping = nullptr;  // 1 while the proxy sleeps and nobody has woken it yet
    std::uint64_t capacity = 0;         // slots, a power of two
    int wake_fd = -1;                   // eventfd that ends the proxy's sleep
    FifoDeviceRing device;

    // Pushes a command. Returns ok, or why the command was not queued. `pad` supplies the abort word and
    // takes the diagnosis at the deadline (monotonic_ns clock).
    WaitResult push(const PutCommand& command, const SignalPad& pad, std::uint64_t deadline_ns,
                    Diagnosis who) const {
        if (pad.aborted() != AbortCode::none) return WaitResult::aborted;
        const auto next = shared(*head);
        const auto drained = shared(*tail);
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
        shared(slot.commit)
            .store(FifoSlot::commit_word(ticket, capacity), std::memory_order_seq_cst);
        wake();
        return WaitResult::ok;
    }

    // Ends the proxy's sleep, if it sleeps. Any thread of this process.
    void wake() const {
        const auto asleep = shared(*sleeping);
        if (asleep.load(std::memory_order_seq_cst) == 0) return;
        if (asleep.exchange(0, std::memory_order_acq_rel) == 0) return;
        ring(wake_fd);
    }

    // Claims the ring for one device from now on; the proxy sees it at once. Returns false where the ring has
    // a device already.
    [[nodiscard]] bool claim_device() const {
        if (shared(*device.claimed).exchange(1, std::memory_order_seq_cst) != 0) {
            return false;
        }
        wake();
        return true;
    }
    // Announces that work which the host now queues for the device will push: the proxy stays awake for it.
    // Any thread.
    void await_device() const {
        shared(*device.awaited).fetch_add(1, std::memory_order_seq_cst);
        wake();
    }
    // Releases the ring: nothing on the device pushes any more.
    void release_device() const { shared(*device.claimed).store(0, std::memory_order_seq_cst); }

  private:
    WaitResult wait_for_space(const SignalPad& pad, std::uint64_t deadline_ns,
                              Diagnosis who) const {
        const auto next = shared(*head);
        const auto drained = shared(*tail);
        const auto sleepers = shared(*waiting);
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
                sleep_while(low_half(tail), static_cast<std::uint32_t>(seen), pause,
                            Reach::process);
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
