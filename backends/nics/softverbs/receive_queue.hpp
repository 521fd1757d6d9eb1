// The receive queue of a queue pair of either kind: any thread posts, the engine takes.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <vector>

namespace mkernel::nics::softverbs {

inline constexpr std::uint32_t kMaxSge = 4;

struct ReceiveRequest {
    std::uint64_t wr_id;
    std::uint32_t pieces;
    ibv_sge sge[kMaxSge];
};

class ReceiveQueue {
  public:
    explicit ReceiveQueue(std::uint32_t depth) : requests_(depth) {}

    // As ibv_post_recv of a queue pair in `state`, for requests of `least` to `most` pieces.
    int post(ibv_recv_wr* wr, ibv_recv_wr** bad, const std::atomic<int>& state, int least,
             std::uint32_t most) {
        const std::lock_guard lock(mutex_);
        const int now = state.load(std::memory_order_acquire);
        std::uint64_t posted = posted_.load(std::memory_order_relaxed);
        int error = 0;
        for (; wr != nullptr; wr = wr->next) {
            if (posted - taken_.load(std::memory_order_acquire) >= requests_.size()) error = ENOMEM;
            if (now == IBV_QPS_RESET || wr->num_sge < least ||
                wr->num_sge > static_cast<int>(most)) {
                error = EINVAL;
            }
            if (error != 0) break;
            ReceiveRequest& r = requests_[posted % requests_.size()];
            r.wr_id = wr->wr_id;
            r.pieces = static_cast<std::uint32_t>(wr->num_sge);
            std::copy_n(wr->sg_list, wr->num_sge, r.sge);
            ++posted;
        }
        if (error != 0 && bad != nullptr) *bad = wr;
        // seq_cst: before the look at the engine's `sleeping`.
        posted_.store(posted, std::memory_order_seq_cst);
        return error;
    }

    [[nodiscard]] bool empty() const {
        return taken_.load(std::memory_order_relaxed) == posted_.load(std::memory_order_seq_cst);
    }
    // The oldest; there must be one.
    ReceiveRequest take() {
        const std::uint64_t number = taken_.load(std::memory_order_relaxed);
        const ReceiveRequest oldest = requests_[number % requests_.size()];
        taken_.store(number + 1, std::memory_order_release);
        return oldest;
    }
    // Forgets all. The state must already be one in which nothing is posted.
    void clear() {
        const std::lock_guard lock(mutex_);
        taken_.store(posted_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }

  private:
    std::mutex mutex_;
    std::vector<ReceiveRequest> requests_;
    std::atomic<std::uint64_t> posted_{0};
    std::atomic<std::uint64_t> taken_{0};
};

}  // namespace mkernel::nics::softverbs
