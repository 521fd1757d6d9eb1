// Streams and staging of the mover, on one device, in a context of their own. A driver call of the rank's
// that waits for running kernels (freeing memory, loading a kernel at its first launch) keeps its context's
// lock meanwhile, and those kernels may wait for a copy from here.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/copy_list.hpp"
#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/own_context.hpp"
#include "backends/accelerators/cuda/submitter.hpp"

namespace mkernel::cuda {

class Lanes {
  public:
    explicit Lanes(int device) : context_(device) {
        const OwnContext::Scope scope(context_);
        int least = 0;
        int greatest = 0;
        check(driver().ctx_get_stream_priority_range(&least, &greatest),
              "cuCtxGetStreamPriorityRange");
        for (CUstream* stream : {&read_, &write_}) {
            check(driver().stream_create_with_priority(stream, CU_STREAM_NON_BLOCKING, greatest),
                  "cuStreamCreateWithPriority");
        }
        for (CUevent& event : events_) {
            check(driver().event_create(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        }
        void* pinned = nullptr;
        check(driver().mem_host_alloc(&pinned, kBytes + kAlign, CU_MEMHOSTALLOC_PORTABLE),
              "cuMemHostAlloc");
        staging_ = static_cast<std::byte*>(pinned);
        done_ = reinterpret_cast<std::uint64_t*>(staging_ + kBytes);
        *done_ = 0;
    }

    [[nodiscard]] const OwnContext& context() const { return context_; }

    // Reserves staging for so many bytes until the batch that is being filled is done; null: there is none
    // now.
    std::byte* reserve(std::size_t bytes) {
        const std::size_t whole = (bytes + kAlign - 1) / kAlign * kAlign;
        std::uint64_t at = head_;
        if (at % kBytes + whole > kBytes) at += kBytes - at % kBytes;
        if (at + whole - tail_ > kBytes) return nullptr;
        head_ = at + whole;
        return staging_ + at % kBytes;
    }

    // Add copies to the device, in order, and copies from it to host memory, which are there with the batch.
    void add(const QueuedCopy& copy) { writes_.add(copy); }
    void add_fetch(std::byte* to, std::uint64_t from, std::byte* staging, std::size_t bytes) {
        fetches_.push_back({to, staging, bytes});
        writes_.add({0, from, reinterpret_cast<std::uint64_t>(staging), bytes});
    }

    std::uint64_t submit() {
        submitter_.check();
        const std::uint64_t ticket = ++last_;
        submitter_.give({ticket, std::exchange(writes_, {})});
        batches_.push_back({ticket, head_, std::exchange(fetches_, {})});
        return ticket;
    }

    bool done(std::uint64_t ticket) {
        submitter_.check();
        const std::uint64_t ended = std::atomic_ref(*done_).load(std::memory_order_acquire);
        while (!batches_.empty() && batches_.front().ticket <= ended) {
            for (const Fetch& each : batches_.front().fetches) {
                std::memcpy(each.to, each.staging, each.bytes);
            }
            tail_ = batches_.front().staging_end;
            batches_.pop_front();
        }
        if (ended >= ticket) return true;
        if (++asked_ % kAskDriver == 0) {
            const OwnContext::Scope scope(context_);
            for (CUstream stream : {read_, write_}) {
                const CUresult found = driver().stream_query(stream);
                if (found != CUDA_ERROR_NOT_READY) check(found, "copies of the mover");
            }
        }
        return false;
    }

    // Waits until nothing that was submitted uses any memory any more. Makes no driver call that waits.
    void wait() {
        const auto until = std::chrono::steady_clock::now() + kLimit;
        while (!done(last_)) {
            if (std::chrono::steady_clock::now() >= until) {
                throw std::runtime_error(
                    "batch " + std::to_string(last_) + " of copies on device " +
                    std::to_string(context_.device()) + " did not end within " +
                    std::to_string(kLimit.count()) + " s");
            }
            std::this_thread::yield();
        }
    }

  private:
    static constexpr std::size_t kBytes = 64 << 20;
    static constexpr std::size_t kAlign = 256;
    static constexpr std::size_t kStep =
        1 << 20;  // of what is staged: one is read while the one before is written
    static constexpr std::uint32_t kAskDriver =
        4096;  // questions without an answer between looks for an error
    static constexpr std::chrono::seconds kLimit{10};  // until copies that do not end are an error

    struct Fetch {
        std::byte* to;
        std::byte* staging;
        std::size_t bytes;
    };
    struct Batch {
        std::uint64_t ticket;
        std::uint64_t staging_end;
        std::vector<Fetch> fetches;
    };

    struct Submission {
        std::uint64_t ticket = 0;
        CopyList copies;
    };

    // ---- by the submitter's thread

    void hand_over(Submission& batch) {
        const OwnContext::Scope scope(context_);
        const auto& copies = batch.copies.join();
        for (std::size_t from = 0; from < copies.size();) {
            std::size_t to = from;
            std::size_t staged = 0;
            while (to < copies.size() && staged < kStep) {
                if (copies[to].staging != 0) staged += copies[to].bytes;
                ++to;
            }
            run({copies.data() + from, to - from});
            from = to;
        }
        check(driver().stream_write_value(write_, reinterpret_cast<CUdeviceptr>(done_),
                                          batch.ticket, CU_STREAM_WRITE_VALUE_DEFAULT),
              "cuStreamWriteValue64");
    }

    // Reads the staged bytes, then writes them and those that go straight, in order.
    void run(std::span<const QueuedCopy> copies) {
        reads_.clear();
        for (const QueuedCopy& each : copies) {
            if (each.staging != 0 && each.from != 0) {
                reads_.push_back({each.staging, each.from, 0, each.bytes});
            }
        }
        if (!reads_.empty()) {
            queue(reads_, read_);
            CUevent event = events_[next_event_++ % events_.size()];
            check(driver().event_record(event, read_), "cuEventRecord");
            check(driver().stream_wait_event(write_, event, 0), "cuStreamWaitEvent");
        }
        reads_.clear();
        for (const QueuedCopy& each : copies) {
            if (each.to == 0) continue;  // a fetch
            reads_.push_back(
                {each.to, each.staging != 0 ? each.staging : each.from, 0, each.bytes});
        }
        queue(reads_, write_);
    }

    // Queues copies, in one call for many where the driver has it; those of a call have no order.
    void queue(const std::vector<QueuedCopy>& copies, CUstream stream) {
#if CUDA_VERSION >= 13000
        if (copies.size() > 1 && !overlap(copies)) {
            to_.clear();
            from_.clear();
            bytes_.clear();
            for (const QueuedCopy& each : copies) {
                to_.push_back(each.to);
                from_.push_back(each.from);
                bytes_.push_back(each.bytes);
            }
            CUmemcpyAttributes attributes{};
            attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
            attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
            std::size_t first = 0;
            check(driver().memcpy_batch(to_.data(), from_.data(), bytes_.data(), copies.size(),
                                        &attributes, &first, 1, stream),
                  "cuMemcpyBatchAsync");
            return;
        }
#endif
        for (const QueuedCopy& each : copies) {
            check(driver().memcpy_async(each.to, each.from, each.bytes, stream), "cuMemcpyAsync");
        }
    }

    // Returns true where copies overlap: in the order of where they go, as they are joined, neighbours show
    // it.
    static bool overlap(const std::vector<QueuedCopy>& copies) {
        const auto both = [](const QueuedCopy& one, const QueuedCopy& other) {
            return one.overlaps(other);
        };
        if (std::ranges::is_sorted(copies, {}, [](const QueuedCopy& each) { return each.to; })) {
            return std::ranges::adjacent_find(copies, both) != copies.end();
        }
        for (std::size_t i = 1; i < copies.size(); ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                if (copies[i].overlaps(copies[j])) return true;
            }
        }
        return false;
    }

    OwnContext context_;
    CUstream read_ = nullptr;   // from devices into staging
    CUstream write_ = nullptr;  // into the device
    std::array<CUevent, 64> events_{};
    std::size_t next_event_ = 0;
    std::byte* staging_ = nullptr;
    std::uint64_t* done_ = nullptr;  // ticket of the last batch that is done; the device writes
    std::uint64_t head_ = 0;         // bytes of staging ever reserved,
    std::uint64_t tail_ = 0;         // and given back
    std::uint64_t last_ = 0;
    std::uint32_t asked_ = 0;
    CopyList writes_;
    std::vector<Fetch> fetches_;
    std::deque<Batch> batches_;
    // The submitter's own vectors.
    std::vector<QueuedCopy> reads_;
    std::vector<CUdeviceptr> to_, from_;
    std::vector<std::size_t> bytes_;
    Submitter<Submission> submitter_{[this](Submission& batch) { hand_over(batch); }};
};

}  // namespace mkernel::cuda
