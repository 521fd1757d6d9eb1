// The device side of the command FIFO, by which a grid requests a put from the host's proxy thread without a
// system call. Host code and CUDA; tests run it on a host.
//
// Slots and tail lie in pinned host memory (fifo_slot.hpp), tickets in device memory:
//
//   free     how many more tickets may be taken. A producer takes one away and puts it back if there was
//            none. It is at most what the ring had free when the tail was last read, so a producer that took
//            one away owns a slot before it knows which, and no ticket is ever taken without being published.
//   head     the next ticket.
//   tail     as it was last read from the host. Only a producer that finds nothing free reads it again,
//            one at a time: nobody else polls over PCIe.
//
// The slot is written by 16-byte stores and published by one st.release.sys, which orders them, and what
// the thread knows to be written before, ahead of the commit word.
//
// ORDER. Commands of one thread are executed in the order of its pushes, also those of several threads
// that a barrier orders. The proxy gives a slot back by its release store to the tail; the acquire of the
// tail, the release addition to `free` and the acquire that takes it away order everything that follows after
// that. Which slot was given back by then depends on how many took from `free`, not on who did: a thread that
// took early may draw a late ticket. The ticket is therefore drawn with acquire and release: the thread that
// has it comes after all that drew before, and one of them took from `free` what this ticket's slot was given
// back by.
#pragma once

#include <cstdint>

#include "backends/transport/fifo_atomics.hpp"
#include "backends/transport/fifo_slot.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::transport {

// The conditions under which a wait of a device's thread ends without its word.
struct DeviceLimits {
    const std::uint32_t* abort = nullptr;  // pinned host memory; anything but 0 ends the wait
    std::uint64_t timeout_ns = 0;
    const std::uint32_t* failed = nullptr;  // the same in memory of the device, where there is one

    [[nodiscard]] MKERNEL_HOST_DEVICE bool aborted() const {
        return (failed != nullptr && load_relaxed(failed) != 0) || load_relaxed(abort) != 0;
    }
};

// In memory of the device. One cache line of the device for each word that many threads change.
struct FifoTickets {
    alignas(128) std::uint64_t free = 0;  // signed: below 0 while producers find nothing
    alignas(128) std::uint64_t head = 0;
    alignas(128) std::uint64_t tail = 0;
    std::uint32_t reading = 0;  // 1 while a producer reads the host's tail
    std::uint32_t stopped = 0;  // 1 once a push timed out or saw the abort word

    // Returns the tickets of a ring that nobody pushes to. Commands that are still in it stay.
    [[nodiscard]] static FifoTickets of(const FifoRingMemory& ring) {
        FifoTickets tickets;
        tickets.head = ring.head();
        tickets.tail = load_acquire(ring.tail);
        tickets.free = ring.capacity - (tickets.head - tickets.tail);
        return tickets;
    }
};

// Plain handle, passed to kernels by value. backends/accelerators/cuda/device_fifo.hpp makes it.
struct FifoDevice {
    FifoSlot* slots = nullptr;            // pinned host memory, as the device addresses it
    const std::uint64_t* tail = nullptr;  // likewise
    FifoTickets* tickets = nullptr;
    std::uint64_t capacity = 0;

    // Pushes a command, from any thread of the device. Returns ok; aborted: the abort word is set, or a push
    // of this device gave up before; timed_out: this push is the first that gave up, with the ring full all
    // the time. After either of the latter, no push succeeds any more: the caller leaves the diagnosis and
    // ends its work.
    [[nodiscard]] MKERNEL_HOST_DEVICE WaitResult push(const PutCommand& command,
                                                      const DeviceLimits& limits) const {
        if (!take()) {
            const WaitResult result = wait(limits);
            if (result != WaitResult::ok) return result;
        }
        const std::uint64_t ticket = near::fetch_add_acq_rel(&tickets->head, 1);
        FifoSlot& slot = slots[ticket & (capacity - 1)];
        slot.write(command);
        transport::store_release(&slot.commit, FifoSlot::commit_word(ticket, capacity));
        return WaitResult::ok;
    }

  private:
    // Taken away once by the thread that stops the pushes: nothing is free any more.
    static constexpr std::uint64_t kStopped = std::uint64_t{1} << 62;

    [[nodiscard]] MKERNEL_HOST_DEVICE bool take() const {
        const std::uint64_t before =
            near::fetch_add_acquire(&tickets->free, ~std::uint64_t{0});  // - 1
        if (static_cast<std::int64_t>(before) > 0) return true;
        near::add_release(&tickets->free, 1);
        return false;
    }

    // Waits until there is a slot, which is the caller's then.
    [[nodiscard]] MKERNEL_HOST_DEVICE WaitResult wait(const DeviceLimits& limits) const {
        const std::uint64_t start = near::now_ns();
        while (true) {
            if (load_relaxed(&tickets->stopped) != 0) return WaitResult::aborted;
            if (static_cast<std::int64_t>(load_relaxed(&tickets->free)) > 0 && take()) {
                return WaitResult::ok;
            }
            if (load_relaxed(&tickets->reading) == 0 &&
                near::exchange_acquire(&tickets->reading, 1) == 0) {
                const bool aborted = limits.aborted();
                const bool mine = !aborted && read_tail();
                near::store_release(&tickets->reading, 0);
                if (mine) return WaitResult::ok;
                if (aborted) return stop(), WaitResult::aborted;
            }
            if (near::now_ns() - start > limits.timeout_ns) {
                return stop() ? WaitResult::timed_out : WaitResult::aborted;
            }
            near::pause();
        }
    }

    // Reads the tail, by the one thread that set `reading`. Returns true where slots were drained since, and
    // one of them is its own.
    [[nodiscard]] MKERNEL_HOST_DEVICE bool read_tail() const {
        const std::uint64_t drained = load_acquire(tail);
        const std::uint64_t news = drained - tickets->tail;
        if (news == 0) return false;
        tickets->tail = drained;
        near::add_release(&tickets->free, news - 1);
        return true;
    }

    // Stops all pushes; returns true to the first caller.
    MKERNEL_HOST_DEVICE bool stop() const {
        if (near::exchange_acquire(&tickets->stopped, 1) != 0) return false;
        near::add_release(&tickets->free, ~kStopped + 1);  // - kStopped
        return true;
    }
};

}  // namespace mkernel::transport
