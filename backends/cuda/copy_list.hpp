// Copies that are queued together: neighbours become one, and what overlaps keeps its order.
#pragma once

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
    // Whether the other one begins where this one ends, everywhere.
    [[nodiscard]] bool precedes(const QueuedCopy& other) const {
        return follows(to, other.to) && follows(from, other.from) &&
               follows(staging, other.staging);
    }

  private:
    [[nodiscard]] bool follows(std::uint64_t one, std::uint64_t other) const {
        return one == 0 ? other == 0 : other == one + bytes;
    }
};

class CopyList {
  public:
    static constexpr std::size_t kLook = 16;  // copies that a new one is compared with

    // Behind all that it overlaps.
    void add(const QueuedCopy& copy) {
        std::size_t at = copies_.size();
        for (std::size_t looked = 0; at > 0 && looked < kLook; ++looked) {
            QueuedCopy& each = copies_[--at];
            if (each.precedes(copy)) {
                each.bytes += copy.bytes;
                return;
            }
            if (each.overlaps(copy)) break;
            if (copy.precedes(each)) {
                each = {copy.to, copy.from, copy.staging, copy.bytes + each.bytes};
                return;
            }
        }
        copies_.push_back(copy);
    }
    [[nodiscard]] bool empty() const { return copies_.empty(); }
    [[nodiscard]] const std::vector<QueuedCopy>& copies() const { return copies_; }
    void clear() { copies_.clear(); }

  private:
    std::vector<QueuedCopy> copies_;
};

}  // namespace mkernel::cuda
