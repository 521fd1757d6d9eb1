// Completion queues and channels.
//
// A queue has one producer, the context's engine, and any number of pollers behind a lock. What the
// engine wrote to memory before it adds an entry is visible to whoever polls that entry.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "backends/nics/softverbs/port.hpp"

namespace mkernel::nics::softverbs {

struct Qp;

// A pipe of 8-byte pointers to queues; `fd` of the verbs structure is its reading end.
struct Channel : ibv_comp_channel {
    Fd read_end;
    Fd write_end;
};

struct Cq : ibv_cq {
    struct Entry {
        ibv_wc wc;
        Qp* qp;                    // null: void, its queue pair is gone
        std::uint64_t reclaim_to;  // send requests of `qp` whose slots this frees; 0: a receive
    };

    std::vector<Entry> entries;  // a power of two
    alignas(64) std::atomic<std::uint64_t> head{0};
    alignas(64) std::atomic<std::uint64_t> tail{0};
    std::atomic<int> armed{0};  // 0; 1 any entry; 2 solicited only
    std::atomic<bool> overrun{false};
    std::mutex poll_lock;
    std::uint32_t users = 0;

    // Engine only. False where the queue is full: it is then in error for good.
    bool push(const Entry& entry, bool solicited);
    // Any thread.
    int poll(int count, ibv_wc* out);
    // Under the control lock: voids what belongs to a queue pair that goes away.
    void forget(const Qp* qp);
};

}  // namespace mkernel::nics::softverbs
