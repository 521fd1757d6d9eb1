// The sleeping cores of one call on one rank, and their signals: the check finds, without waiting for a
// deadline, that none of them can ever be woken.
//
// A wait names the rank that raises its signal. Once every core that has not returned sleeps on
// signals that only this rank raises, nobody is left to raise them: the two kernels wait for each
// other, or for a core that has returned without its signal. Any other wait may still be ended, by
// another rank or by a core at work, until its deadline. A passed deadline is a time-out of the call,
// strict or not; `at_deadline` returns in addition which core was waiting for what.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <string>

#include "backends/transport/signal_pad.hpp"

namespace mkernel::ascend::sim {

// All members may be called from any core's thread.
class Waits {
  public:
    struct Wait {
        std::string core, place;
        std::uint32_t signal = 0;
        std::uint64_t value = 0;
        std::uint32_t peer = 0;  // raises it
    };

    // `cores`: those of all kernels of the call, also those that have not started.
    Waits(transport::SignalPad pad, std::uint32_t rank, std::uint32_t cores)
        : pad_(pad), rank_(rank), left_(cores) {}

    // Called before a sleep, and after one that its signal ended; those that an abort or the deadline ended
    // stay listed. IsaError: nobody will end it; the core must not sleep.
    [[nodiscard]] std::list<Wait>::iterator sleep(Wait wait);
    void wake(std::list<Wait>::iterator wait);
    // Called when a core has returned. IsaError: now nobody can wake the others.
    void ended();
    // Called when a wait passed its deadline. Only the first of them counts: the others are its consequences.
    void deadline_passed();
    // Returns what `all` was at the deadline; empty: no wait passed its own.
    [[nodiscard]] std::string at_deadline() const;
    // "AIC core 0 for signal 12 of rank 1 to be 2, now 1 (compute.hpp:183); ..."
    [[nodiscard]] std::string all() const;

  private:
    [[nodiscard]] std::string deadlock() const;  // empty: there is none
    [[nodiscard]] std::string list() const;

    mutable std::mutex mutex_;
    std::list<Wait> waits_;
    std::string at_deadline_;
    transport::SignalPad pad_;
    std::uint32_t rank_, left_;
};

}  // namespace mkernel::ascend::sim
