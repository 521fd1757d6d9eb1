#include "backends/accelerators/ascend/sim/strict_waits.hpp"

#include <algorithm>
#include <utility>

#include "backends/accelerators/ascend/sim/isa_error.hpp"

namespace mkernel::ascend::sim {

std::list<Waits::Wait>::iterator Waits::sleep(Wait wait) {
    const std::lock_guard lock(mutex_);
    const auto made = waits_.insert(waits_.end(), std::move(wait));
    if (const std::string stuck = deadlock(); !stuck.empty()) {
        waits_.erase(made);
        throw IsaError(stuck);
    }
    return made;
}

void Waits::wake(std::list<Wait>::iterator wait) {
    const std::lock_guard lock(mutex_);
    waits_.erase(wait);
}

void Waits::ended() {
    const std::lock_guard lock(mutex_);
    --left_;
    if (const std::string stuck = deadlock(); !stuck.empty()) throw IsaError(stuck);
}

void Waits::deadline_passed() {
    const std::lock_guard lock(mutex_);
    if (at_deadline_.empty()) at_deadline_ = list();
}

std::string Waits::at_deadline() const {
    const std::lock_guard lock(mutex_);
    return at_deadline_;
}

std::string Waits::all() const {
    const std::lock_guard lock(mutex_);
    return list();
}

std::string Waits::deadlock() const {
    if (waits_.empty() || waits_.size() < left_) return {};
    if (pad_.aborted() != transport::AbortCode::none) return {};  // all of them end
    const bool stuck = std::all_of(waits_.begin(), waits_.end(), [this](const Wait& wait) {
        return wait.peer == rank_ && pad_.load(wait.signal) < wait.value;
    });
    if (!stuck) return {};
    return "rank " + std::to_string(rank_) +
           ", deadlock: every core that has not returned waits for a signal of this rank, which "
           "nobody is left to raise: " +
           list();
}

std::string Waits::list() const {
    constexpr std::size_t kMost = 8;
    std::string text;
    std::size_t count = 0;
    for (const Wait& wait : waits_) {
        if (count++ == kMost) break;
        text += (text.empty() ? "" : "; ") + wait.core + " for signal " +
                std::to_string(wait.signal) + " of rank " + std::to_string(wait.peer) + " to be " +
                std::to_string(wait.value) + ", now " + std::to_string(pad_.load(wait.signal)) +
                " (" + wait.place + ")";
    }
    if (waits_.size() > kMost) text += "; and " + std::to_string(waits_.size() - kMost) + " more";
    return text;
}

}  // namespace mkernel::ascend::sim
