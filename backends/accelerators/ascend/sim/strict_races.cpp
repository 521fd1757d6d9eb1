#include "backends/accelerators/ascend/sim/strict_races.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace mkernel::ascend::sim {

using isa::GlobalView;

void Races::join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

Races::CoreId Races::enter(std::string name) {
    const std::lock_guard lock(mutex_);
    const auto core = static_cast<CoreId>(clocks_.size());
    names_.push_back(std::move(name));
    Clock& clock = clocks_.emplace_back(ended_);
    clock.resize(std::max<std::size_t>(clock.size(), core + 1));
    clock[core] = 1;
    return core;
}

void Races::end_kernel() {
    const std::lock_guard lock(mutex_);
    for (const Clock& clock : clocks_) join(ended_, clock);
}

void Races::raise(CoreId core, std::uint32_t peer, std::uint32_t signal) {
    const std::lock_guard lock(mutex_);
    Clock& clock = clocks_[core];
    join(peer == rank_ ? signals_[signal] : outside_, clock);
    ++clock[core];
}

void Races::seen(CoreId core, std::uint32_t peer, std::uint32_t signal) {
    const std::lock_guard lock(mutex_);
    if (const auto found = signals_.find(signal); found != signals_.end()) {
        join(clocks_[core], found->second);
    }
    if (peer != rank_) join(clocks_[core], outside_);
}

Races::Entry& Races::Views::entry(const GlobalView& view) {
    const auto same = [&view](const GlobalView& other) {
        return other.rows == view.rows && other.cols == view.cols && other.dtype == view.dtype &&
               other.row_stride == view.row_stride && other.col_stride == view.col_stride;
    };
    const auto length = static_cast<std::uint64_t>(end_of(view) - view.base);
    auto& entries = by_length_[std::bit_ceil(length)];
    auto [it, last] = entries.equal_range(view.base);
    for (; it != last; ++it) {
        if (same(it->second.view)) return it->second;
    }
    return entries.emplace(view.base, Entry{view, {}})->second;
}

const Races::Touch* Races::Views::conflict(const GlobalView& view, CoreId core,
                                           const Clock& clock) const {
    for (const auto& [length, entries] : by_length_) {
        const auto first = entries.upper_bound(view.base - length);
        const auto last = entries.lower_bound(end_of(view));
        for (auto it = first; it != last; ++it) {
            for (const Touch& touch : it->second.by) {
                const bool before = touch.core == core ||
                                    (touch.core < clock.size() && clock[touch.core] >= touch.tick);
                if (!before && overlap(it->second.view, view)) return &touch;
            }
        }
    }
    return nullptr;
}

std::string Races::access(CoreId core, const Site& site, isa::Pipe pipe, const GlobalView& view,
                          bool write) {
    const std::lock_guard lock(mutex_);
    const Clock& clock = clocks_[core];
    const Touch* other = written_.conflict(view, core, clock);
    const bool theirs = other != nullptr;
    if (other == nullptr && write) other = read_.conflict(view, core, clock);
    if (other != nullptr) {
        return std::string(write ? "overwrites " : "reads ") + describe(view) + ", part of which " +
               names_[other->core] + " " + (theirs ? "writes" : "reads") + " in " +
               describe(other->site, other->pipe) +
               ": no signal orders the two cores; a TNOTIFY or a TWAIT is missing";
    }
    std::vector<Touch>& by = (write ? written_ : read_).entry(view).by;
    const Touch now{core, clock[core], site, pipe};
    if (write) {
        by.assign(1, now);
        return {};
    }
    const auto own = std::find_if(by.begin(), by.end(),
                                  [core](const Touch& touch) { return touch.core == core; });
    if (own == by.end()) {
        by.push_back(now);
    } else {
        *own = now;
    }
    return {};
}

}  // namespace mkernel::ascend::sim
