#include "backends/nics/softverbs/completion.hpp"

namespace mkernel::nics::softverbs {

bool Cq::push(const Entry& entry) {
    if (filled - tail.load(std::memory_order_acquire) >= entries.size()) {
        overrun.store(true, std::memory_order_relaxed);
        return false;
    }
    entries[filled++ & (entries.size() - 1)] = entry;
    return true;
}

void Cq::show() {
    if (head.load(std::memory_order_relaxed) == filled) return;
    // seq_cst: ordered before the look at `armed`, as the poller arms before it looks again.
    head.store(filled, std::memory_order_seq_cst);
    if (channel != nullptr && armed.load(std::memory_order_seq_cst) &&
        armed.exchange(false, std::memory_order_acq_rel)) {
        ibv_cq* self = this;
        [[maybe_unused]] const ssize_t written =
            ::write(static_cast<Channel*>(channel)->write_end.get(), &self, sizeof(self));
    }
}

int Cq::poll(int count, ibv_wc* out) {
    const std::lock_guard lock(poll_lock);
    std::uint64_t at = tail.load(std::memory_order_relaxed);
    const std::uint64_t end = head.load(std::memory_order_seq_cst);
    int got = 0;
    while (at != end && got < count) {
        const Entry& entry = entries[at & (entries.size() - 1)];
        ++at;
        if (entry.qp == nullptr) continue;
        if (entry.reclaim_to != 0) entry.qp->reclaim(entry.reclaim_to);
        out[got++] = entry.wc;
    }
    tail.store(at, std::memory_order_release);
    polls_in_vain.store(got != 0 ? 0 : polls_in_vain.load(std::memory_order_relaxed) + 1,
                        std::memory_order_relaxed);
    return got;
}

void Cq::forget(const SlotOwner* qp) {
    const std::lock_guard lock(poll_lock);
    const std::uint64_t end = head.load(std::memory_order_acquire);
    for (std::uint64_t at = tail.load(std::memory_order_relaxed); at != end; ++at) {
        Entry& entry = entries[at & (entries.size() - 1)];
        if (entry.qp == qp) entry.qp = nullptr;
    }
}

}  // namespace mkernel::nics::softverbs
