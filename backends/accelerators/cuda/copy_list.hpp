// Copies that are submitted together: as few as possible. Where two of them write the same bytes, those of
// the later one last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mkernel::cuda {

struct QueuedCopy {
    std::uint64_t to = 0;       // 0: it stays in `staging`
    std::uint64_t from = 0;     // 0: it is in `staging` already
    std::uint64_t staging = 0;  // pinned host memory on the way; 0: straight
    std::size_t bytes = 0;

    [[nodiscard]] bool overlaps(const QueuedCopy& other) const {
        return to != 0 && other.to != 0 && to < other.to + other.bytes && other.to < to + bytes;
    }
    // Returns true where the other copy begins where this one ends, everywhere.
    [[nodiscard]] bool precedes(const QueuedCopy& other) const {
        return follows(to, other.to) && follows(from, other.from) &&
               follows(staging, other.staging);
    }
    // Returns true where this copy writes everything that the other one does: a message that a NIC places
    // twice.
    [[nodiscard]] bool repeats(const QueuedCopy& other) const {
        return from != 0 && other.from != 0 && to != 0 && other.to >= to &&
               other.to + other.bytes <= to + bytes && other.from - from == other.to - to;
    }

  private:
    [[nodiscard]] bool follows(std::uint64_t one, std::uint64_t other) const {
        return one == 0 ? other == 0 : other == one + bytes;
    }
};

class CopyList {
  public:
    void add(const QueuedCopy& copy) {
        if (!copies_.empty() && copies_.back().precedes(copy)) {
            copies_.back().bytes += copy.bytes;
        } else {
            copies_.push_back(copy);
        }
    }
    [[nodiscard]] bool empty() const { return copies_.empty(); }
    // Joins neighbours, in whatever order they came. Copies that overlap keep their order, and all the others
    // with them.
    const std::vector<QueuedCopy>& join() {
        if (copies_.size() > 1) join_sorted();
        return copies_;
    }
    void clear() { copies_.clear(); }

  private:
    void join_sorted() {
        sorted_ = copies_;
        std::ranges::stable_sort(sorted_, {}, [](const QueuedCopy& each) { return each.to; });
        std::size_t last = 0;
        for (std::size_t i = 1; i < sorted_.size(); ++i) {
            QueuedCopy& before = sorted_[last];
            const QueuedCopy& next = sorted_[i];
            if (before.precedes(next)) {
                before.bytes += next.bytes;
            } else if (before.repeats(next)) {
                continue;
            } else if (before.overlaps(next)) {
                return;
            } else {
                sorted_[++last] = next;
            }
        }
        sorted_.resize(last + 1);
        copies_.swap(sorted_);
    }

    std::vector<QueuedCopy> copies_;
    std::vector<QueuedCopy> sorted_;
};

}  // namespace mkernel::cuda
