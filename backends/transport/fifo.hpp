// The host side of the command FIFO: owns its rings and drains them. See fifo_slot.hpp for the slots.
//
// A FIFO has two rings, because tickets are taken where the producers are: one for threads of the host
// (fifo_host.hpp), one for a device (fifo_device.hpp), which has no cost until a device claims it.
//
// One thread (the proxy) calls pop, release, prepare_sleep, end_sleep; any thread may read depth(),
// device_claimed() and the handle. The handle's address is stable for the object's life.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/transport/fifo_host.hpp"
#include "backends/transport/shared_word.hpp"

namespace mkernel::transport {

// A ring and its drainer's end.
class FifoRing {
  public:
    // Makes the ring; `slots` is rounded up to a power of two. std::system_error where there is no memory.
    explicit FifoRing(std::uint64_t slots);
    ~FifoRing();
    FifoRing(const FifoRing&) = delete;
    FifoRing& operator=(const FifoRing&) = delete;

    [[nodiscard]] const FifoRingMemory& memory() const { return memory_; }
    // A word of the first page for the ring's users.
    [[nodiscard]] std::uint32_t* flag() const;

    // Copies the next command out. Returns false where there is none. Its slot stays taken until release().
    bool pop(PutCommand& command) {
        if (!ready()) return false;
        command = next_slot().command;
        ++next_;
        return true;
    }
    [[nodiscard]] bool ready() const {
        return shared(next_slot().commit).load(std::memory_order_seq_cst) ==
               FifoSlot::commit_word(next_, memory_.capacity);
    }
    // Gives every popped slot back. Returns false where there was none.
    bool release();

    // The counts of tickets: popped() commands have been taken out so far; those before published() can be.
    [[nodiscard]] std::uint64_t popped() const { return next_; }
    [[nodiscard]] std::uint64_t published() const { return memory_.head(); }

  private:
    [[nodiscard]] FifoSlot& next_slot() const {
        return memory_.slots[next_ & (memory_.capacity - 1)];
    }

    FifoRingMemory memory_;
    std::uint64_t next_ = 0;
};

class Fifo {
  public:
    // Makes both rings with `slots`, rounded up to a power of two. std::system_error where no eventfd or no
    // memory is left.
    explicit Fifo(std::uint64_t slots);
    ~Fifo();
    Fifo(const Fifo&) = delete;
    Fifo& operator=(const Fifo&) = delete;

    [[nodiscard]] const FifoHandle& handle() const { return handle_; }
    [[nodiscard]] int wake_fd() const { return handle_.wake_fd; }

    [[nodiscard]] FifoRing& host() { return host_; }
    [[nodiscard]] FifoRing& device() { return device_; }
    [[nodiscard]] bool ready() const { return host_.ready() || device_.ready(); }
    // Gives every popped slot back; wakes host threads that wait for space once a quarter is free.
    void release();

    // Returns the number of tickets of the host's ring that were ever taken.
    [[nodiscard]] std::uint64_t pushed() const;
    // Returns the number of commands in both rings.
    [[nodiscard]] std::uint64_t depth() const;
    // Returns true where a device may push, which cannot wake the proxy.
    [[nodiscard]] bool device_claimed() const;
    // Returns how often the host has queued work that will push.
    [[nodiscard]] std::uint64_t awaited() const;

    // The order of a sleep: prepare_sleep, then look at everything once more, then ppoll on wake_fd(), then
    // end_sleep.
    void prepare_sleep();
    void end_sleep();

  private:
    struct Lines;  // the words that the host's producers and the proxy share, a cache line each
    struct FreeLines {
        void operator()(Lines* lines) const;
    };
    FifoRing host_;
    FifoRing device_;
    std::unique_ptr<Lines, FreeLines> lines_;
    FifoHandle handle_;
};

}  // namespace mkernel::transport
