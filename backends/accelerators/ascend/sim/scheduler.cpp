#include "backends/accelerators/ascend/sim/scheduler.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace mkernel::ascend::sim {

Scheduler::~Scheduler() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        for (Worker* each : idle_) each->wake.notify_one();
    }
    for (const auto& each : workers_) each->thread.join();
}

void Scheduler::reserve(std::size_t tasks) {
    const std::lock_guard lock(mutex_);
    workers_.reserve(reserved_ + tasks);
    idle_.reserve(reserved_ + tasks);
    while (workers_.size() < reserved_ + tasks) {
        auto made = std::make_unique<Worker>();
        made->thread = std::thread([this, self = made.get()] { work(*self); });
        idle_.insert(idle_.begin(), made.get());
        workers_.push_back(std::move(made));
    }
    reserved_ += tasks;
}

void Scheduler::submit(int priority, std::vector<Task> tasks) {
    const std::lock_guard lock(mutex_);
    submitted_ += tasks.size();
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
                Worker* worker = idle_.back();  // there is one for each task that is reserved
                idle_.pop_back();
                worker->task = std::move(fresh_[priority].front());
                fresh_[priority].pop_front();
                worker->wake.notify_one();
                found = true;
            }
        }
        if (!found) return;
        ++running_;
    }
}

void Scheduler::work(Worker& self) {
    pthread_setname_np(pthread_self(), "ascend-core");
    std::unique_lock lock(mutex_);
    while (true) {
        self.wake.wait(lock, [&] { return self.task != nullptr || over(); });
        if (self.task == nullptr) return;
        Task task = std::exchange(self.task, nullptr);
        lock.unlock();
        task();
        task = nullptr;  // releases what it holds before the slot goes on
        lock.lock();
        --running_;
        --reserved_;
        --submitted_;
        idle_.push_back(&self);
        dispatch();
        if (over()) {
            for (Worker* each : idle_) each->wake.notify_one();
        }
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
