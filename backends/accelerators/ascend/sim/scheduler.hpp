// The scheduler of simulated cores on host threads, few at a time.
//
// A rank has up to 72 cores and a host may have two CPUs, so only `slots` cores of a process *run*
// at once; the others are not started yet, or sleep on a signal. A running core keeps its slot, and
// so its warm caches, until it blocks. Vector cores (priority 0) go before cube cores (priority 1):
// peers depend on what they send. A core that is blocked keeps its thread, so each reserved core has one: a
// lack of threads shows before a launch begins, not in its midst. Threads stay for the next launch, and the
// one that was busy last goes on first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace mkernel::ascend::sim {

class Scheduler {
  public:
    static constexpr int kPriorities = 2;
    using Task = std::function<void()>;  // must not throw

    explicit Scheduler(unsigned slots) : slots_(slots > 0 ? slots : 1) {}
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;
    // Every task must be able to end by itself (waits have deadlines); the destructor joins.
    ~Scheduler();

    // Reserves threads for so many tasks beside those that are reserved already. Throws std::system_error
    // where the host has none left; nothing is reserved then.
    void reserve(std::size_t tasks);
    // Runs tasks that were reserved.
    void submit(int priority, std::vector<Task> tasks);

    // Give the slot up before sleeping, and take it back after. Called from a running task only.
    void begin_block();
    void end_block(int priority);
    // Lets ready tasks of more urgent priority run first. Called from a running task.
    void yield(int priority);

    void set_slots(unsigned slots);

    // Returns the process's scheduler. A forked child gets a fresh one. It lives until `shutdown_process`.
    static Scheduler& process();
    static void shutdown_process();

  private:
    struct Ticket {
        std::condition_variable granted_signal;
        bool granted = false;
    };

    struct Worker {
        std::thread thread;
        std::condition_variable wake;
        Task task;  // to be run next
    };

    void dispatch();  // with mutex_ held: fill free slots
    void take_slot(int priority, std::unique_lock<std::mutex>& lock);
    void work(Worker& self);
    [[nodiscard]] bool over() const { return stopping_ && submitted_ == 0; }

    std::mutex mutex_;
    std::deque<Task> fresh_[kPriorities];        // not yet started
    std::deque<Ticket*> resuming_[kPriorities];  // want their slot back
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<Worker*> idle_;  // the one that was busy last at the end
    unsigned slots_;
    unsigned running_ = 0;
    std::size_t reserved_ = 0;   // tasks that have not ended,
    std::size_t submitted_ = 0;  // and those of them that were submitted
    bool stopping_ = false;
};

}  // namespace mkernel::ascend::sim
