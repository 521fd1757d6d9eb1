// The host side of the command FIFO: owns the ring and drains it. See fifo_device.hpp for the
// slots.
//
// One thread (the proxy) calls pop, release, prepare_sleep, end_sleep; any thread may read depth()
// and the handle. The handle's address is stable for the object's life.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/transport/fifo_device.hpp"

namespace mkernel::transport {

class Fifo {
  public:
    // `slots` is rounded up to a power of two. Throws std::system_error where no eventfd is left.
    explicit Fifo(std::uint64_t slots);
    ~Fifo();
    Fifo(const Fifo&) = delete;
    Fifo& operator=(const Fifo&) = delete;

    [[nodiscard]] const FifoDevice& device() const { return device_; }
    [[nodiscard]] int wake_fd() const { return device_.wake_fd; }

    // Copies the next command out. False where there is none. Its slot stays taken until release().
    bool pop(PutCommand& command);
    [[nodiscard]] bool ready() const;
    // Gives every popped slot back; wakes producers that wait for space once a quarter is free.
    void release();

    // Tickets: popped() commands were ever taken out, pushed() were ever promised.
    [[nodiscard]] std::uint64_t popped() const { return next_; }
    [[nodiscard]] std::uint64_t pushed() const;
    [[nodiscard]] std::uint64_t depth() const;

    // prepare_sleep, then look at everything once more, then ppoll on wake_fd(), then end_sleep.
    void prepare_sleep();
    void end_sleep();

  private:
    struct Lines;  // the words that producers and the proxy share, a cache line each
    struct FreeLines {
        void operator()(Lines* lines) const;
    };
    std::unique_ptr<Lines, FreeLines> lines_;
    std::unique_ptr<FifoSlot[]> slots_;
    FifoDevice device_;
    std::uint64_t next_ = 0;
};

}  // namespace mkernel::transport
