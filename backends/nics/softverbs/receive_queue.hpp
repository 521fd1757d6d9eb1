// The receive queue of a queue pair of either kind: any thread posts, the engine takes. A receive is
// its number alone, because an immediate brings no bytes to its pieces.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <vector>

namespace mkernel::nics::softverbs {

class ReceiveQueue {
  public:
    explicit ReceiveQueue(std::uint32_t depth) : wr_ids_(depth) {}

    // Posts receives, as ibv_post_recv of a queue pair in `state`, for requests of `least` to `most` pieces.
    int post(ibv_recv_wr* wr, ibv_recv_wr** bad, const std::atomic<int>& state, int least,
             std::uint32_t most) {
        const std::lock_guard lock(mutex_);
        const int now = state.load(std::memory_order_acquire);
        std::uint64_t posted = posted_.load(std::memory_order_relaxed);
        int error = 0;
        for (; wr != nullptr; wr = wr->next) {
            if (posted - taken_.load(std::memory_order_acquire) >= wr_ids_.size()) error = ENOMEM;
            if (now == IBV_QPS_RESET || wr->num_sge < least ||
                wr->num_sge > static_cast<int>(most)) {
                error = EINVAL;
            }
            if (error != 0) break;
            wr_ids_[posted++ % wr_ids_.size()] = wr->wr_id;
        }
        if (error != 0 && bad != nullptr) *bad = wr;
        // seq_cst: before the look at the engine's `sleeping`.
        posted_.store(posted, std::memory_order_seq_cst);
        return error;
    }

    [[nodiscard]] bool empty() const {
        return taken_.load(std::memory_order_relaxed) == posted_.load(std::memory_order_seq_cst);
    }
    // Takes the oldest receive and returns its wr_id; there must be one.
    std::uint64_t take() {
        const std::uint64_t number = taken_.load(std::memory_order_relaxed);
        const std::uint64_t oldest = wr_ids_[number % wr_ids_.size()];
        taken_.store(number + 1, std::memory_order_release);
        return oldest;
    }

  private:
    std::mutex mutex_;
    std::vector<std::uint64_t> wr_ids_;
    std::atomic<std::uint64_t> posted_{0};
    std::atomic<std::uint64_t> taken_{0};
};

}  // namespace mkernel::nics::softverbs
