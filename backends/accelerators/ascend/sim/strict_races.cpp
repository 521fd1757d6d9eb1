#include "backends/accelerators/ascend/sim/strict_races.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "backends/accelerators/ascend/sim/race_log.hpp"

namespace mkernel::ascend::sim {

using isa::GlobalView;

void Races::join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool Races::is_shared(const GlobalView& view) const {
    return std::any_of(shared_.begin(), shared_.end(), [&view](const Range& range) {
        return view.base < range.base + range.bytes && end_of(view) > range.base;
    });
}

Races::CoreId Races::enter(std::uint32_t rank, std::string name) {
    const std::lock_guard lock(mutex_);
    const auto core = static_cast<CoreId>(cores_.size());
    Clock& clock = cores_.emplace_back(Member{rank, std::move(name), ended_[rank]}).clock;
    clock.resize(core + 1);
    clock[core] = 1;
    if (log_ != nullptr) log_->enter(core, cores_[core].name);
    return core;
}

void Races::end_kernel(std::uint32_t rank) {
    const std::lock_guard lock(mutex_);
    for (const Member& core : cores_) {
        if (core.rank == rank) join(ended_[rank], core.clock);
    }
    if (log_ != nullptr) log_->end_kernel();
}

void Races::raise(CoreId core, std::uint32_t peer, std::uint32_t signal,
                  const std::function<std::uint64_t()>& add) {
    const std::lock_guard lock(mutex_);
    Member& own = cores_[core];
    const std::uint64_t value = add();
    if (log_ != nullptr) log_->raise(core, peer, signal, value);
    if (!shared_.empty() || peer == own.rank) {
        Signal& raised = signals_[{peer, signal}];
        join(raised.all, own.clock);
        if (value != 0) raised.raised.push_back({value, raised.all});
        if (raised.raised.size() > Signal::kKept) raised.raised.pop_front();
    } else {
        join(outside_, own.clock);
    }
    ++own.clock[core];
}

void Races::seen(CoreId core, std::uint32_t peer, std::uint32_t signal, std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    if (log_ != nullptr) log_->seen(core, peer, signal, value);
    Member& own = cores_[core];
    const Signal& raised = signals_[{own.rank, signal}];
    const auto enough =
        std::find_if(raised.raised.begin(), raised.raised.end(),
                     [value](const Signal::Raised& each) { return each.value >= value; });
    join(own.clock, enough == raised.raised.end() ? raised.all : enough->clock);
    if (peer != own.rank) join(own.clock, outside_);
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

template <class Counts>
const Races::Touch* Races::Views::conflict(const GlobalView& view, Counts&& counts) const {
    for (const auto& [length, entries] : by_length_) {
        const auto first = entries.upper_bound(view.base - length);
        const auto last = entries.lower_bound(end_of(view));
        for (auto it = first; it != last; ++it) {
            for (const Touch& touch : it->second.by) {
                if (counts(touch) && overlap(it->second.view, view)) return &touch;
            }
        }
    }
    return nullptr;
}

std::string Races::access(CoreId core, const Site& site, isa::Pipe pipe, const GlobalView& view,
                          bool write) {
    const std::lock_guard lock(mutex_);
    if (log_ != nullptr) log_->access(core, site, pipe, view, write);
    const Member& own = cores_[core];
    const Clock& clock = own.clock;
    // Memory that ranks do not share may have been another rank's before: tensors come and go.
    const bool of_all = is_shared(view);
    const auto unordered = [&](const Touch& touch) {
        if (touch.core == core) return false;
        if (touch.core < clock.size() && clock[touch.core] >= touch.tick) return false;
        return of_all || cores_[touch.core].rank == own.rank;
    };
    const Touch* other = written_.conflict(view, unordered);
    const bool theirs = other != nullptr;
    if (other == nullptr && write) other = read_.conflict(view, unordered);
    if (other != nullptr) {
        return std::string(write ? "overwrites " : "reads ") + describe(view) + ", part of which " +
               cores_[other->core].name + " " + (theirs ? "writes" : "reads") + " in " +
               describe(other->site, other->pipe) +
               ": no signal orders the two cores; a TNOTIFY or a TWAIT is missing";
    }
    std::vector<Touch>& by = (write ? written_ : read_).entry(view).by;
    const Touch now{core, clock[core], site, pipe};
    if (write) {
        by.assign(1, now);
        return {};
    }
    const auto latest = std::find_if(by.begin(), by.end(),
                                     [core](const Touch& touch) { return touch.core == core; });
    if (latest == by.end()) {
        by.push_back(now);
    } else {
        *latest = now;
    }
    return {};
}

}  // namespace mkernel::ascend::sim
