// SRD: queue pairs without a connection, and the fabric that carries their messages.
//
// What holds: a message arrives once and whole, or its sender is told why not. What does not:
// any order between messages, to one peer or to several, nor between the bytes of one message.
// Correct bytes may be placed twice, though never after the message's completion at either end.
// Both are drawn from a generator with a settable seed, at the receiver.
//
// An error concerns its message only; the queue pair goes on.
//
// Threads: the wr_* calls and post_recv by any thread (a lock each); Fabric::step by the engine,
// which holds the context's control lock; everything else under that lock.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>
#include <vector>

#include "backends/nics/softverbs/completion.hpp"
#include "backends/nics/softverbs/memory.hpp"
#include "backends/nics/softverbs/port.hpp"

namespace mkernel::nics::softverbs {

struct Context;
class Fabric;

inline constexpr std::uint32_t kSrdSendSge = 2;
inline constexpr std::uint32_t kSrdRdmaSge = 1;
inline constexpr std::uint32_t kSrdReceiveSge = 2;
inline constexpr std::uint32_t kSrdInline = 32;
inline constexpr std::uint32_t kSrdMaxWr = 4096;
inline constexpr std::uint32_t kSrdMaxSend = kFlowPayload;  // bytes of a SEND

struct AddressHandle : ibv_ah {
    PortAddress address;
};

struct SrdRequest {
    std::uint64_t wr_id;
    PortAddress peer;
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    std::uint32_t imm;
    std::uint32_t qpn;
    std::uint32_t queue_key;
    std::uint32_t total;
    std::uint32_t pieces;
    bool addressed;
    bool inlined;
    Opcode opcode;
    std::array<ibv_sge, kSrdSendSge> sge;
    std::array<std::byte, kSrdInline> inline_data;
};

struct SrdReceive {
    std::uint64_t wr_id;
    std::uint32_t pieces;
    std::array<ibv_sge, kSrdReceiveSge> sge;
};

struct SrdQp final : ibv_qp_ex, SlotOwner {
    SrdQp(Context& context, const ibv_qp_init_attr_ex& init, std::uint32_t number);
    ~SrdQp();

    static SrdQp& of(ibv_qp_ex* qp) { return *static_cast<SrdQp*>(qp); }
    static SrdQp& of(ibv_qp* qp) { return of(reinterpret_cast<ibv_qp_ex*>(qp)); }

    // Behind the ibv_wr_* calls. start() takes the lock that complete() and abort() release; the
    // first error of a batch stays, and complete() then posts nothing of it.
    void start();
    int complete();
    void abort();
    void begin(Opcode opcode, std::uint32_t rkey, std::uint64_t remote_addr, std::uint32_t imm);
    void set_address(ibv_ah* ah, std::uint32_t qpn, std::uint32_t queue_key);
    void set_inline(std::size_t count, const ibv_data_buf* buffers);
    void set_sge(std::size_t count, const ibv_sge* list);

    int post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad);
    void reclaim(std::uint64_t slots) override {
        reclaimed_.fetch_add(slots, std::memory_order_release);
    }

    // 0 or an errno, as ibv_modify_qp.
    int modify(const ibv_qp_attr& attr, int mask);
    void query(ibv_qp_attr& attr, ibv_qp_init_attr& init) const;
    void enter_error();

    [[nodiscard]] bool receives() const {
        return qp_base.state == IBV_QPS_RTR || qp_base.state == IBV_QPS_RTS;
    }
    [[nodiscard]] bool has_receive() const {
        return rq_taken_.load(std::memory_order_relaxed) !=
               rq_posted_.load(std::memory_order_seq_cst);
    }
    SrdReceive take_receive();
    void complete_send(std::uint64_t wr_id, Opcode opcode, std::uint32_t bytes,
                       ibv_wc_status status, std::uint32_t vendor_err);
    void complete_receive(const SrdReceive& receive, ibv_wc_status status,
                          const FlowPacket& packet);

    std::uint32_t queue_key = 0;
    std::uint8_t rnr_retry = 7;

  private:
    friend class Fabric;
    SrdRequest* staging(bool inline_data);
    void push(Cq* queue, const Cq::Entry& entry);
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
    std::uint64_t sent_ = 0;     // engine
    std::uint32_t cursor_ = 0;   // engine: bytes of the request `sent_` already on their way
    std::uint64_t held_at_ = 0;  // engine: since when a cut link has held requests; 0: it has not

    std::mutex rq_lock_;
    std::vector<SrdReceive> rq_;
    std::atomic<std::uint64_t> rq_posted_{0};
    std::atomic<std::uint64_t> rq_taken_{0};
};

class Fabric {
  public:
    explicit Fabric(Context& context);
    ~Fabric();

    // Under the control lock. Null with errno.
    SrdQp* create_qp(const ibv_qp_init_attr_ex& init);
    void destroy_qp(SrdQp* qp);
    AddressHandle* create_ah(ibv_pd* pd, const PortAddress& address);
    void destroy_ah(AddressHandle* ah);
    // Messages of a queue pair that broke or goes away: their answers are ignored.
    void forget(const SrdQp* qp);

    bool step(std::uint64_t now, std::uint64_t& wake_at);

  private:
    struct InFlight {
        bool busy = false;
        SrdQp* qp = nullptr;  // null: nobody waits for the answer
        std::uint64_t wr_id = 0;
        Opcode opcode = Opcode::pad;
        std::uint32_t total = 0;
    };
    struct Outgoing {
        PortAddress address;
        std::shared_ptr<RemotePort> remote;  // null: not reached yet
        std::uint32_t index = kMaxFlows;     // kMaxFlows: no flow claimed
        std::uint64_t word = 0;
        std::uint64_t head = 0, published = 0;
        std::uint64_t next = 0;      // number of the next message
        std::uint64_t answered = 0;  // of the log
        std::uint32_t waiting = 0;   // in flight
        std::uint64_t lost_at = 0;   // since when messages to the peer have been lost; 0: none is
        std::uint64_t quiet_at =
            0;  // since when the peer or our link has been silent; 0: it is not
        std::uint64_t tried_at = 0;
        bool dropped = false;  // FaultKind::drop
        std::vector<InFlight> window{kFlowWindow};
    };
    struct Arriving {
        FlowPacket first;
        std::uint32_t taken = 0;        // bytes taken from the flow
        std::uint32_t outstanding = 0;  // placements still to do
        ibv_wc_status status = IBV_WC_SUCCESS;
        std::vector<std::byte> payload;  // of a SEND
        std::uint64_t rnr_since = 0;
    };
    struct Incoming {
        std::uint32_t index = 0;
        std::uint64_t word = 0;
        PortAddress from;
        std::shared_ptr<RemotePort> sender;
        std::uint64_t tail = 0;
        std::uint64_t answered = 0;
        std::unordered_map<std::uint64_t, Arriving> messages;
        std::vector<std::uint64_t> unready;  // messages that want a receive
    };
    struct Placement {
        Incoming* flow;
        FlowPacket packet;
        std::vector<std::byte> payload;
        std::uint64_t not_before;
    };

    // Sending.
    Outgoing& outgoing(const PortAddress& address);
    static bool present(Outgoing& out, std::uint64_t now);
    bool reach(Outgoing& out, std::uint64_t now);
    bool send(SrdQp& qp, std::uint64_t now);
    bool withstands_faults(SrdQp& qp, Outgoing& out, std::uint64_t now);
    bool give_up_held(SrdQp& qp, std::uint64_t now, std::uint64_t& wake_at);
    ibv_wc_status sound(const SrdQp& qp, const SrdRequest& request) const;
    bool transmit(SrdQp& qp, const SrdRequest& request, Outgoing& out, std::uint64_t now);
    std::byte* reserve(Outgoing& out, std::uint32_t bytes);
    void publish(Outgoing& out);
    bool take_answers(Outgoing& out);
    bool check_peer(Outgoing& out, std::uint64_t now, std::uint64_t& wake_at);
    void answer(Outgoing& out, InFlight& message, ibv_wc_status status, std::uint32_t vendor_err);
    void close(Outgoing& out);

    // Receiving.
    void accept(std::uint64_t now);
    bool take(Incoming& in, std::uint64_t now, std::uint64_t& wake_at);
    bool place(std::uint64_t now, std::uint64_t& wake_at);
    void execute(Placement& placement);
    ibv_wc_status judge(const Incoming& in, const FlowPacket& packet) const;
    void finish(Incoming& in, std::uint64_t message, Arriving& arriving);
    bool retry_unready(Incoming& in, std::uint64_t now, std::uint64_t& wake_at);
    ibv_wc_status scatter(const SrdQp& qp, const SrdReceive& receive,
                          const std::vector<std::byte>& payload) const;
    void reply(Incoming& in, std::uint64_t message, ibv_wc_status status);
    void drop(Incoming& in);

    Context& context_;
    std::unordered_map<std::uint32_t, std::unique_ptr<SrdQp>> qps_;
    std::vector<std::unique_ptr<AddressHandle>> handles_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Outgoing>> outgoing_;  // by cookie
    std::array<std::unique_ptr<Incoming>, kMaxFlows> incoming_;
    std::vector<Placement> placements_;
    std::mt19937_64 random_;
    std::uint32_t next_qpn_;
    std::uint64_t looked_at_ = 0;  // when the senders were last seen alive
};

}  // namespace mkernel::nics::softverbs
