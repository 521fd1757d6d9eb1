// Completion queues and channels.
//
// A queue has one producer, the context's engine, and any number of pollers behind a lock. Bytes that the
// engine wrote to memory before it adds an entry are visible to every poller of that entry.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "backends/nics/softverbs/port.hpp"

namespace mkernel::nics::softverbs {

// The owner of a queue pair's slots, which gets them back once the completion that frees them was polled. Any
// thread.
class SlotOwner {
  public:
    virtual void reclaim(std::uint64_t to) = 0;

  protected:
    ~SlotOwner() = default;
};

// A pipe of 8-byte pointers to queues; `fd` of the verbs structure is its reading end.
struct Channel : ibv_comp_channel {
    Fd read_end;
    Fd write_end;
};

struct Cq : ibv_cq {
    struct Entry {
        ibv_wc wc;
        SlotOwner* qp;             // null: void, its queue pair is gone
        std::uint64_t reclaim_to;  // what to tell `qp`; 0: nothing
    };
    // Returns the entry of a request of `bytes` that ended. The queue pair says in `reclaim_to` what it frees.
    static Entry ended(SlotOwner* qp, ibv_wc_opcode opcode, std::uint32_t qp_num,
                       std::uint64_t wr_id, std::uint32_t bytes, ibv_wc_status status,
                       std::uint32_t vendor_err = 0) {
        Entry entry{};
        entry.qp = qp;
        entry.wc.wr_id = wr_id;
        entry.wc.status = status;
        entry.wc.opcode = opcode;
        entry.wc.vendor_err = vendor_err;
        entry.wc.byte_len = bytes;
        entry.wc.qp_num = qp_num;
        return entry;
    }
    // Returns the entry of a receive that this message took.
    template <class Message>
    static Entry received(SlotOwner* qp, std::uint32_t qp_num, std::uint32_t src_qp,
                          std::uint64_t wr_id, ibv_wc_status status, const Message& m) {
        Entry entry = ended(qp, IBV_WC_RECV_RDMA_WITH_IMM, qp_num, wr_id, m.total, status);
        entry.wc.src_qp = src_qp;
        if (m.opcode == Opcode::write_imm) {
            entry.wc.imm_data = m.imm;
            entry.wc.wc_flags = IBV_WC_WITH_IMM;
        }
        return entry;
    }

    std::vector<Entry> entries;  // a power of two
    alignas(64) std::atomic<std::uint64_t> head{0};
    alignas(64) std::atomic<std::uint64_t> tail{0};
    std::atomic<bool> armed{false};
    std::atomic<bool> overrun{false};
    std::mutex poll_lock;
    std::uint32_t users = 0;
    std::atomic<std::uint32_t> polls_in_vain{0};  // since the last completion
    std::uint64_t filled =
        0;  // engine: entries ever added, of which pollers see those before `head`

    // Adds an entry. Engine only; see Context::complete. Returns false where the queue is full: it is then in
    // error for good.
    bool push(const Entry& entry);
    // Makes added entries visible to pollers. Engine only. Called once for several entries, since a word that
    // two threads share costs more than they do.
    void show();
    // Polls. Any thread.
    int poll(int count, ibv_wc* out);
    // Voids, under the control lock, the entries that belong to a queue pair that goes away.
    void forget(const SlotOwner* qp);
};

}  // namespace mkernel::nics::softverbs
