#include "backends/accelerators/ascend/sim/scheduler.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

namespace mkernel::ascend::sim {

Scheduler::~Scheduler() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        work_ready_.notify_all();
    }
    // Tasks that still run may make threads: each is listed before the one that made it ends.
    while (true) {
        std::thread thread;
        {
            const std::lock_guard lock(mutex_);
            if (threads_.empty()) return;
            thread = std::move(threads_.back());
            threads_.pop_back();
        }
        thread.join();
    }
}

void Scheduler::submit(int priority, std::vector<Task> tasks) {
    const std::lock_guard lock(mutex_);
    std::move(tasks.begin(), tasks.end(), std::back_inserter(fresh_[priority]));
    dispatch();
}

void Scheduler::dispatch() {
    while (running_ < slots_) {
        bool found = false;
        for (int priority = 0; priority < kPriorities && !found; ++priority) {
            if (!resuming_[priority].empty()) {
                Ticket* ticket = resuming_[priority].front();
                resuming_[priority].pop_front();
                ticket->granted = true;
                ticket->granted_signal.notify_one();
                found = true;
            } else if (!fresh_[priority].empty()) {
                started_.push_back(std::move(fresh_[priority].front()));
                fresh_[priority].pop_front();
                if (idle_ >= started_.size()) {
                    work_ready_.notify_one();
                } else {
                    threads_.emplace_back([this] { work(); });
                }
                found = true;
            }
        }
        if (!found) return;
        ++running_;
    }
}

void Scheduler::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        if (!started_.empty()) {
            Task task = std::move(started_.front());
            started_.pop_front();
            lock.unlock();
            task();
            task = nullptr;  // releases what it holds before the slot goes on
            lock.lock();
            --running_;
            dispatch();
            if (stopping_) work_ready_.notify_all();
            continue;
        }
        if (stopping_ && fresh_[0].empty() && fresh_[1].empty()) return;
        ++idle_;
        work_ready_.wait(lock);
        --idle_;
    }
}

void Scheduler::begin_block() {
    const std::lock_guard lock(mutex_);
    --running_;
    dispatch();
}

void Scheduler::take_slot(int priority, std::unique_lock<std::mutex>& lock) {
    Ticket ticket;
    resuming_[priority].push_back(&ticket);
    dispatch();
    ticket.granted_signal.wait(lock, [&] { return ticket.granted; });
}

void Scheduler::end_block(int priority) {
    std::unique_lock lock(mutex_);
    take_slot(priority, lock);
}

void Scheduler::yield(int priority) {
    std::unique_lock lock(mutex_);
    bool urgent = false;
    for (int each = 0; each < priority; ++each) {
        urgent = urgent || !resuming_[each].empty() || !fresh_[each].empty();
    }
    if (!urgent) return;
    --running_;
    take_slot(priority, lock);
}

void Scheduler::set_slots(unsigned slots) {
    const std::lock_guard lock(mutex_);
    slots_ = std::max(1u, slots);
    dispatch();
}

namespace {
std::mutex g_process_mutex;
Scheduler* g_scheduler = nullptr;  // deliberately not destroyed by static destructors
pid_t g_owner = 0;
}  // namespace

Scheduler& Scheduler::process() {
    const std::lock_guard lock(g_process_mutex);
    // A forked child inherits the object but none of its threads: leave it, make a new one.
    if (g_scheduler == nullptr || g_owner != getpid()) {
        g_scheduler = new Scheduler(std::thread::hardware_concurrency());
        g_owner = getpid();
    }
    return *g_scheduler;
}

void Scheduler::shutdown_process() {
    Scheduler* scheduler = nullptr;
    {
        const std::lock_guard lock(g_process_mutex);
        if (g_owner == getpid()) scheduler = std::exchange(g_scheduler, nullptr);
    }
    delete scheduler;
}

}  // namespace mkernel::ascend::sim
