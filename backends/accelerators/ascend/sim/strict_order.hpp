// The order of a core's instructions: a vector clock for each pipe.
//
// Every instruction gets the next tick of its pipe. `clock[p][q]` is the last tick of pipe q that
// pipe p's next instruction is ordered after. S issues everything, so what S is ordered after comes
// before every later instruction of every pipe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "backends/accelerators/ascend/isa/pipe.hpp"

namespace mkernel::ascend::sim {

class Order {
  public:
    using Clock = std::array<std::uint32_t, isa::kPipes>;

    // Returns the tick of the next instruction of `pipe`.
    std::uint32_t issue(isa::Pipe pipe) {
        join(of(pipe), of(isa::Pipe::S));
        return ++of(pipe)[index(pipe)];
    }
    // Returns true where the next instruction of `pipe` comes after tick `at` of `other`.
    [[nodiscard]] bool after(isa::Pipe pipe, isa::Pipe other, std::uint32_t at) const {
        return clocks_[index(pipe)][index(other)] >= at;
    }

    // Returns false where the event is set a second time, and `waiting` may not have waited for the first
    // yet.
    bool set(isa::Pipe source, isa::Pipe waiting, std::uint32_t event) {
        issue(source);
        Event& flag = event_of(source, waiting, event);
        flag.set = of(source);
        return after(source, waiting, flag.waited);
    }
    void wait(isa::Pipe source, isa::Pipe waiting, std::uint32_t event) {
        Event& flag = event_of(source, waiting, event);
        flag.waited = issue(waiting);
        join(of(waiting), flag.set);
    }
    // Orders the next instructions of `later` after everything that `earlier` was given.
    void follow(isa::Pipe later, isa::Pipe earlier) { join(of(later), of(earlier)); }
    // Orders every pipe's next instruction after everything issued.
    void all() {
        Clock latest{};
        for (const Clock& clock : clocks_) join(latest, clock);
        clocks_.fill(latest);
    }

  private:
    struct Event {
        Clock set{};
        std::uint32_t waited = 0;
    };
    static constexpr std::size_t index(isa::Pipe pipe) { return static_cast<std::size_t>(pipe); }
    Clock& of(isa::Pipe pipe) { return clocks_[index(pipe)]; }
    Event& event_of(isa::Pipe source, isa::Pipe waiting, std::uint32_t event) {
        return events_[index(source)][index(waiting)][event];
    }
    static void join(Clock& clock, const Clock& other) {
        for (std::size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
    }

    std::array<Clock, isa::kPipes> clocks_{};
    std::array<std::array<std::array<Event, isa::kEvents>, isa::kPipes>, isa::kPipes> events_{};
};

}  // namespace mkernel::ascend::sim
