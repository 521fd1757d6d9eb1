// The check for races: whether two cores touch the same global memory with nothing to order them, cores of
// one call on one rank, or of all calls of a world whose ranks run in one process.
//
// It keeps a vector clock for each core: up to where each other core's accesses come before its next one. A
// signal carries the clocks of those who raised it, up to the value that was waited for, to the waiter. Ranks
// in other processes are not seen from here: anything that any of them was signalled may come back with any
// signal that another rank raises. So order is sometimes assumed that is not there, and every report is a
// race.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/sim/strict_ranges.hpp"

namespace mkernel::ascend::sim {

class RaceLog;

// All members may be called from any core's thread.
class Races {
  public:
    using CoreId = std::uint32_t;
    struct Range {
        const std::byte* base = nullptr;
        std::size_t bytes = 0;
    };

    // Checks the cores of one rank. `log`: where ranks are processes, the log that a walk of all ranks' logs
    // needs.
    explicit Races(RaceLog* log = nullptr) : log_(log) {}
    // Checks all ranks of a world, which touch each other's memory in `shared` alone.
    explicit Races(std::vector<Range> shared) : shared_(std::move(shared)) {}

    // Enters a core when it starts. `name`: its name in messages.
    CoreId enter(std::uint32_t rank, std::string name);
    // Returns a core's name, as it entered.
    [[nodiscard]] const std::string& name(CoreId core) const { return cores_[core].name; }
    // Orders everything that `rank` did so far before everything that its cores do that enter from now on:
    // one kernel is launched after another has ended.
    void end_kernel(std::uint32_t rank);

    // Returns the error of an access, in words; empty if there is none.
    std::string access(CoreId core, const Site& site, isa::Pipe pipe, const isa::GlobalView& view,
                       bool write);
    // Raises a signal of rank `peer`: `add` does, and returns the signal's value after it; 0: not known, or
    // not yet.
    void raise(CoreId core, std::uint32_t peer, std::uint32_t signal,
               const std::function<std::uint64_t()>& add);
    // Called after a signal of the core's rank, which `peer` raises, was seen to stand at `value` or more.
    void seen(CoreId core, std::uint32_t peer, std::uint32_t signal, std::uint64_t value);

  private:
    using Clock = std::vector<std::uint32_t>;  // by core; missing: 0
    struct Signal {
        // The clocks of those who raised a signal up to a value; the latest few.
        struct Raised {
            std::uint64_t value = 0;
            Clock clock;
        };
        static constexpr std::size_t kKept = 64;
        std::deque<Raised> raised;
        Clock all;
    };
    struct Member {
        std::uint32_t rank = 0;
        std::string name;
        Clock clock;
    };
    struct Touch {
        CoreId core = 0;
        std::uint32_t tick = 0;
        Site site;
        isa::Pipe pipe = isa::Pipe::S;
    };
    // The last touches of a view; of readers each core's latest.
    struct Entry {
        isa::GlobalView view{};
        std::vector<Touch> by;
    };
    // The views that were touched: by the power of two that their bytes, from the first to the last, fit,
    // then by the first. A view that may overlap another is therefore near it, however large others are.
    class Views {
      public:
        Entry& entry(const isa::GlobalView& view);
        // Returns the first touch of a view that overlaps and that `counts`.
        template <class Counts>
        const Touch* conflict(const isa::GlobalView& view, Counts&& counts) const;

      private:
        std::map<std::uint64_t, std::multimap<const std::byte*, Entry>> by_length_;
    };

    static void join(Clock& clock, const Clock& other);
    [[nodiscard]] bool is_shared(const isa::GlobalView& view) const;

    std::mutex mutex_;
    RaceLog* log_ = nullptr;
    std::vector<Range> shared_;  // of a whole world; none: of one rank
    std::vector<Member> cores_;
    std::unordered_map<std::uint32_t, Clock> ended_;  // by rank: kernels before the latest launch
    Clock outside_;                                   // what other ranks may know
    std::map<std::pair<std::uint32_t, std::uint32_t>, Signal> signals_;  // by rank and number
    Views written_, read_;
};

}  // namespace mkernel::ascend::sim
