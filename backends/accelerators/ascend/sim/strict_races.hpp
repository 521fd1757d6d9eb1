// Whether two cores of one call, on one rank, touch the same global memory with nothing to order
// them.
//
// A vector clock for each core: up to where each other core's accesses come before its next one. A
// signal carries the clock of who raised it to who waits for it. Other ranks are not seen from here:
// whatever any of them was told may come back with any signal that another rank raises. So order is
// sometimes assumed that is not there (also of a counter that several cores raise: all that have),
// and what is reported is always a race.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/sim/strict_ranges.hpp"

namespace mkernel::ascend::sim {

// All members may be called from any core's thread.
class Races {
  public:
    using CoreId = std::uint32_t;

    explicit Races(std::uint32_t rank) : rank_(rank) {}

    // A core starts. `name`: how messages call it.
    CoreId enter(std::string name);
    // What was done so far comes before all that cores do that enter from now on: one kernel is
    // launched after another has ended.
    void end_kernel();

    // What is wrong with an access, in words; empty if nothing is.
    std::string access(CoreId core, const Site& site, isa::Pipe pipe, const isa::GlobalView& view,
                       bool write);
    // Before rank `peer` can see the signal.
    void raise(CoreId core, std::uint32_t peer, std::uint32_t signal);
    // After a signal that `peer` raises was seen here.
    void seen(CoreId core, std::uint32_t peer, std::uint32_t signal);

  private:
    using Clock = std::vector<std::uint32_t>;  // by core; missing: 0
    struct Touch {
        CoreId core = 0;
        std::uint32_t tick = 0;
        Site site;
        isa::Pipe pipe = isa::Pipe::S;
    };
    // Who touched a view last; of readers each core's latest.
    struct Entry {
        isa::GlobalView view{};
        std::vector<Touch> by;
    };
    // Views that were touched: by the power of two that their bytes, from the first to the last,
    // fit, then by the first. So what may overlap a view is near it, however large others are.
    class Views {
      public:
        Entry& entry(const isa::GlobalView& view);
        // The first touch of a view that overlaps and that `clock` is not after.
        [[nodiscard]] const Touch* conflict(const isa::GlobalView& view, CoreId core,
                                            const Clock& clock) const;

      private:
        std::map<std::uint64_t, std::multimap<const std::byte*, Entry>> by_length_;
    };

    static void join(Clock& clock, const Clock& other);

    std::mutex mutex_;
    std::uint32_t rank_;
    std::vector<std::string> names_;
    std::vector<Clock> clocks_;
    Clock ended_;    // of kernels that ended before a launch
    Clock outside_;  // what other ranks may know
    std::unordered_map<std::uint32_t, Clock> signals_;
    Views written_, read_;
};

}  // namespace mkernel::ascend::sim
