// The scheduler of simulated cores: never more than its slots at once, all tasks run, vector cores
// first, blocked cores let others run, threads end.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <latch>
#include <memory>
#include <system_error>
#include <vector>

#include "backends/accelerators/ascend/sim/scheduler.hpp"
#include "tests/native/ascend/check.hpp"

using mkernel::ascend::sim::Scheduler;
namespace test = mkernel::ascend::test;

namespace {

void at_most_slots_run(unsigned slots) {
    Scheduler scheduler(slots);
    std::atomic<int> running{0}, most{0};
    std::latch all(200);
    std::vector<Scheduler::Task> tasks;
    for (int i = 0; i < 200; ++i) {
        tasks.emplace_back([&, i] {
            const auto enter = [&] {
                const int now = ++running;
                int seen = most;
                while (seen < now && !most.compare_exchange_weak(seen, now)) {
                }
            };
            enter();
            --running;
            scheduler.begin_block();  // as a wait for a signal
            if (i % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
            scheduler.end_block(i % 2);
            enter();
            --running;
            if (i % 2 == 1) scheduler.yield(1);
            all.count_down();
        });
    }
    scheduler.reserve(200);
    scheduler.submit(1, std::move(tasks));
    all.wait();
    CHECK(most <= static_cast<int>(slots));
    CHECK(most >= 1);
}

// One slot: a later task that the first waits for must get to run while it is blocked.
void blocked_tasks_give_way() {
    Scheduler scheduler(1);
    std::latch raised(1), done(2);
    scheduler.reserve(2);
    scheduler.submit(1, {[&] {
                             scheduler.begin_block();
                             raised.wait();
                             scheduler.end_block(1);
                             done.count_down();
                         },
                         [&] {
                             raised.count_down();
                             done.count_down();
                         }});
    done.wait();
}

void urgent_tasks_go_first() {
    Scheduler scheduler(1);
    std::latch begun(1), queued(1), done(3);
    std::vector<int> order;
    scheduler.reserve(3);
    scheduler.submit(1, {[&] {
                             begun.count_down();
                             queued.wait();
                             scheduler.yield(1);
                             order.push_back(1);
                             done.count_down();
                         },
                         [&] {
                             order.push_back(2);
                             done.count_down();
                         }});
    begun.wait();
    scheduler.submit(0, {[&] {
                         order.push_back(0);
                         done.count_down();
                     }});
    queued.count_down();
    done.wait();
    CHECK(order == std::vector<int>({0, 1, 2}));
}

void ending_waits_for_tasks() {
    std::atomic<int> ran{0};
    {
        Scheduler scheduler(2);
        std::vector<Scheduler::Task> tasks(50, [&] {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
            ++ran;
        });
        scheduler.reserve(50);
        scheduler.submit(0, std::move(tasks));
    }
    CHECK(ran == 50);
}

// A process may have run out of threads. What was there before still works.
void a_reservation_fails_whole() {
    Scheduler scheduler(2);
    scheduler.reserve(1);
    pthread_attr_t usual, huge;
    pthread_getattr_default_np(&usual);
    pthread_getattr_default_np(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 47);
    CHECK(pthread_setattr_default_np(&huge) == 0);
    bool refused = false;
    try {
        scheduler.reserve(3);
    } catch (const std::system_error&) {
        refused = true;
    }
    CHECK(pthread_setattr_default_np(&usual) == 0);
    CHECK(refused);
    std::latch done(1);
    scheduler.submit(0, {[&] { done.count_down(); }});
    done.wait();
    scheduler.reserve(3);
    std::latch more(3);
    scheduler.submit(1, std::vector<Scheduler::Task>(3, [&] { more.count_down(); }));
    more.wait();
}

}  // namespace

int main() {
    for (const unsigned slots : {1u, 2u, 5u}) {
        for (int round = 0; round < 5; ++round) at_most_slots_run(slots);
    }
    blocked_tasks_give_way();
    urgent_tasks_go_first();
    ending_waits_for_tasks();
    a_reservation_fails_whole();
    return test::finish();
}
