// An SRD queue pair: its queues, its states, and how its requests are put together. The fabric carries them.
// Requests are writes; EFA's limits hold for them.
//
// Threads: the wr_* calls and post_recv by any thread (a lock each); everything else by the engine or
// under the control lock.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/nics/softverbs/completion.hpp"
#include "backends/nics/softverbs/flow.hpp"
#include "backends/nics/softverbs/receive_queue.hpp"

namespace mkernel::nics::softverbs {

struct Context;
class Fabric;

inline constexpr std::uint32_t kSrdSendSge = 2;
inline constexpr std::uint32_t kSrdReceiveSge = 2;
inline constexpr std::uint32_t kSrdInline = 32;
inline constexpr std::uint32_t kSrdMaxWr = 4096;

struct AddressHandle : ibv_ah {
    PortAddress address;
    std::shared_ptr<RemotePort> remote;  // so that it maps device memory before it is sent anything
};

struct SrdRequest {
    std::uint64_t wr_id;
    PortAddress peer;
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    std::uint32_t imm;
    std::uint32_t qpn;
    std::uint32_t queue_key;
    bool addressed;
    Opcode opcode;
    ibv_sge source;
};

struct SrdQp final : ibv_qp_ex, SlotOwner {
    SrdQp(Context& context, const ibv_qp_init_attr_ex& init, std::uint32_t number);
    ~SrdQp();

    static SrdQp& of(ibv_qp_ex* qp) { return *static_cast<SrdQp*>(qp); }
    static SrdQp& of(ibv_qp* qp) { return of(reinterpret_cast<ibv_qp_ex*>(qp)); }

    // The functions that the ibv_wr_* calls use. start() takes the lock that complete() releases; the first
    // error of a batch stays, and complete() then posts nothing of it.
    void start();
    int complete();
    void begin(Opcode opcode, std::uint32_t rkey, std::uint64_t remote_addr, std::uint32_t imm);
    void set_address(ibv_ah* ah, std::uint32_t qpn, std::uint32_t queue_key);
    void set_sge(const ibv_sge& piece);

    int post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad);
    void reclaim(std::uint64_t slots) override {
        reclaimed_.fetch_add(slots, std::memory_order_release);
    }

    // Modifies the queue pair. Returns 0 or an errno, as ibv_modify_qp.
    int modify(const ibv_qp_attr& attr, int mask);
    void enter_error();

    [[nodiscard]] bool receives() const {
        return qp_base.state == IBV_QPS_RTR || qp_base.state == IBV_QPS_RTS;
    }
    void complete_send(std::uint64_t wr_id, std::uint32_t bytes, ibv_wc_status status,
                       std::uint32_t vendor_err);
    void complete_receive(std::uint64_t wr_id, ibv_wc_status status, const FlowMessage& message);

    std::uint32_t queue_key = 0;
    std::uint8_t rnr_retry = 7;

  private:
    friend class Fabric;
    void end_message() {
        ++sent_;
        begun_ = false;
        cursor_ = 0;
    }
    bool flush();

    Context& context_;
    ibv_qp_cap cap_;
    bool signal_all_;
    std::atomic<int> state_{IBV_QPS_RESET};  // mirrors ibv_qp::state for the posting threads

    std::mutex sq_lock_;
    std::vector<SrdRequest> sq_;
    std::uint64_t staged_ = 0;
    int error_ = 0;
    SrdRequest* current_ = nullptr;
    std::atomic<std::uint64_t> posted_{0};
    std::atomic<std::uint64_t> reclaimed_{0};
    // The engine's position: the first request not sent yet; whether its message has a number, which, and how
    // many of its bytes are on their way.
    std::uint64_t sent_ = 0;
    bool begun_ = false;
    std::uint64_t message_ = 0;
    std::uint32_t cursor_ = 0;
    std::uint64_t held_at_ = 0;  // since when a cut link has held requests; 0: it has not

    ReceiveQueue rq_;
};

}  // namespace mkernel::nics::softverbs
