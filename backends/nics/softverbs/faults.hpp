// The times of the device's planned faults. Each fault's effect is described where it happens: in queue
// pairs, in the fabric, in the engine's round and in registration. Used under the control lock.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/nics/softverbs/config.hpp"

namespace mkernel::nics::softverbs {

class Faults {
  public:
    // `opened`: the moment that times count from.
    Faults(const std::vector<Fault>& plan, std::uint64_t opened) {
        for (const Fault& fault : plan) planned_.push_back({fault, opened, false, 0});
    }

    [[nodiscard]] bool none() const { return planned_.empty(); }
    void count_message() { ++messages_; }
    void count_registration() { ++registrations_; }

    // Returns true where a fault of that kind falls on the next action; once for each.
    bool strikes(FaultKind kind, std::uint64_t now);
    // Called when a message is about to leave: cuts and stalls that wait for its number begin.
    void begin_counted(std::uint64_t now);
    // Returns true while a cut or a stall is on. Lowers `wake_at` to its next change.
    bool lasts(FaultKind kind, std::uint64_t now, std::uint64_t& wake_at);

  private:
    struct Planned {
        Fault fault;
        std::uint64_t opened;
        bool begun;
        std::uint64_t since;
    };
    bool due(const Planned& planned, std::uint64_t now) const;

    std::vector<Planned> planned_;
    std::uint64_t messages_ = 0;
    std::uint64_t registrations_ = 0;
};

}  // namespace mkernel::nics::softverbs
