// A thread that submits batches to the driver, in order. A batch of copies takes a driver 20 us and more
// (H100, some ten copies), and the engine of an emulated NIC has one for each message of a fast rail.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace mkernel::cuda {

template <typename Batch>
class Submitter {
  public:
    // `submit` is the thread's work on a batch. Where it throws, nothing is submitted any more.
    explicit Submitter(std::function<void(Batch&)> submit)
        : submit_(std::move(submit)), thread_([this] { run(); }) {
        pthread_setname_np(thread_.native_handle(), "mkernel-mover");
    }
    ~Submitter() {
        stop_.store(true, std::memory_order_relaxed);
        given_.fetch_add(1, std::memory_order_release);
        given_.notify_one();
        thread_.join();
    }
    Submitter(const Submitter&) = delete;
    Submitter& operator=(const Submitter&) = delete;

    void give(Batch batch) {
        {
            const std::lock_guard lock(mutex_);
            batches_.push_back(std::move(batch));
        }
        given_.fetch_add(1, std::memory_order_release);
        given_.notify_one();
    }
    // Throws the error that `submit` threw.
    void check() const {
        if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(error_);
    }

  private:
    // The next batch follows soon where there was one; a sleeping thread wakes up too late for it.
    static constexpr std::chrono::microseconds kAwake{500};

    void run() {
        for (std::uint64_t taken = 0;; ++taken) {
            await(taken);
            if (stop_.load(std::memory_order_relaxed)) return;
            if (!failed_.load(std::memory_order_relaxed)) submit_next();
        }
    }
    void await(std::uint64_t taken) const {
        const auto until = std::chrono::steady_clock::now() + kAwake;
        while (given_.load(std::memory_order_acquire) == taken) {
            if (std::chrono::steady_clock::now() >= until)
                given_.wait(taken, std::memory_order_acquire);
        }
    }
    void submit_next() {
        Batch batch;
        {
            const std::lock_guard lock(mutex_);
            batch = std::move(batches_.front());
            batches_.pop_front();
        }
        try {
            submit_(batch);
        } catch (...) {
            error_ = std::current_exception();
            failed_.store(true, std::memory_order_release);
        }
    }

    std::function<void(Batch&)> submit_;
    std::mutex mutex_;
    std::deque<Batch> batches_;
    std::atomic<std::uint64_t> given_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // written once, before `failed_`
    std::thread thread_;        // last: it uses all of them
};

}  // namespace mkernel::cuda
