// An RC queue pair: its queues, its requester and its responder.
//
// Threads: post_send and post_recv by any thread (a lock each); step() by the engine, which holds
// the context's control lock; everything else under that lock. A message is one send request;
// messages are numbered from 1 on each connection, and `acked` of the peer's ring counts the
// executed ones.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/nics/softverbs/completion.hpp"
#include "backends/nics/softverbs/device_memory.hpp"
#include "backends/nics/softverbs/memory.hpp"
#include "backends/nics/softverbs/port.hpp"
#include "backends/nics/softverbs/receive_queue.hpp"
#include "backends/nics/softverbs/wire.hpp"

namespace mkernel::nics::softverbs {

struct Context;
struct PayloadSource;

inline constexpr std::uint32_t kMaxSge = 1;
inline constexpr std::uint32_t kMaxInline = 256;
inline constexpr std::uint32_t kMaxWr = 16384;

struct SendRequest {
    std::uint64_t wr_id;
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    std::uint32_t imm;
    bool tells;  // has an immediate
    bool inlined;
    bool signaled;
    ibv_sge source;
};

struct Qp final : ibv_qp, SlotOwner {
    Qp(Context& context, const ibv_qp_init_attr& init, std::uint32_t number);
    ~Qp();

    int post_send(ibv_send_wr* wr, ibv_send_wr** bad);
    int post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad);
    // Called by poll: send requests numbered up to `to` have left the queue.
    void reclaim(std::uint64_t to) override { sq_reclaimed_.store(to, std::memory_order_release); }

    // Modifies the queue pair. Returns 0 or an errno, as ibv_modify_qp.
    int modify(const ibv_qp_attr& attr, int mask);

    // Does everything that can be done now; returns whether that was anything. `wake_at` is lowered to the
    // moment at which something falls due by itself.
    bool step(std::uint64_t now, std::uint64_t& wake_at);

    // Goes to ERR, by `status` where it was an error of the queue pair itself.
    void enter_error();

  private:
    int enqueue(ibv_send_wr* wr, ibv_send_wr** bad);
    Ring& inbound() const;
    Ring& outbound() const;
    int to_init(const ibv_qp_attr& attr, int mask);
    int to_rtr(const ibv_qp_attr& attr);
    int to_rts(const ibv_qp_attr& attr, int mask);
    void disconnect();

    // Requester.
    bool send(std::uint64_t now);
    bool send_message(const SendRequest& request, std::uint64_t now);
    bool take_acks(std::uint64_t now);
    void check_timers(std::uint64_t now, std::uint64_t& wake_at);
    bool peer_responsive(std::uint64_t now);
    std::byte* reserve(std::uint32_t bytes);
    bool claim();
    bool sound(const SendRequest& request);
    bool withstands_faults(std::uint64_t now);
    void complete_send(std::uint64_t number, ibv_wc_status status, std::uint32_t vendor_err);
    void fail_send(std::uint64_t number, ibv_wc_status status, std::uint32_t vendor_err);

    // Responder.
    struct Held {
        Packet packet;
        std::vector<std::byte> payload;  // a copy: the sender may have its memory back already
        std::uint64_t not_before;
    };
    struct Moving {
        Packet packet;
        DeviceCopies::Batch batch;
        bool takes;  // the receive of that number
        std::uint64_t wr_id;
    };
    bool receive(std::uint64_t now, std::uint64_t& wake_at);
    // Queues the copies of packets that are on the link, up to `head`.
    void copy_ahead(std::uint64_t head, std::uint64_t now);
    // Executes the packet; returns whether it was executed. If not it stays at the head of the ring.
    bool execute(const Packet& packet, const std::byte* payload, std::uint64_t now,
                 std::uint64_t& wake_at);
    bool may_write(const Packet& packet) const;
    PayloadSource source_of(const Packet& packet, const std::byte* payload) const;
    bool relaxed(const Packet& packet) const;
    // Places the packet's bytes; returns whether they are there, or on their way in `batch`. If not it must
    // come again.
    bool place(const Packet& packet, const PayloadSource& source, std::uint64_t now,
               DeviceCopies::Batch& batch);
    // Writes the held-back packets that are due; returns whether there were any.
    bool land(std::uint64_t now, std::uint64_t& wake_at);
    // Writes everything that was held back; returns false where there was no room for a copy.
    bool land_all();
    bool land(const Held& held);
    // Ends packets that waited for copies that are done.
    bool settle();
    bool have_receive(std::uint64_t now, std::uint64_t& wake_at);
    void complete_receive(std::uint64_t wr_id, ibv_wc_status status, const Packet& packet);
    void refuse(ibv_wc_status at_requester, ibv_event_type event);
    void publish_executed();

    bool flush_queues();

    Context& context_;
    ibv_qp_cap cap_;
    bool signal_all_;
    std::uint32_t index_;
    std::uint64_t token_;
    std::atomic<int> state_{IBV_QPS_RESET};  // mirrors ibv_qp::state for the posting threads

    // Attributes.
    unsigned int access_ = 0;
    std::uint32_t dest_qp_num_ = 0;
    std::uint32_t sq_psn_ = 0;
    std::uint8_t timeout_ = 0, retry_cnt_ = 0, rnr_retry_ = 0, min_rnr_timer_ = 0;
    std::shared_ptr<RemotePort> remote_;

    // The send queue: numbers of requests, each counts up for ever.
    std::mutex sq_lock_;
    std::vector<SendRequest> sq_;
    std::vector<std::byte> inline_data_;
    std::atomic<std::uint64_t> sq_posted_{0};
    std::atomic<std::uint64_t> sq_reclaimed_{0};
    std::uint64_t sq_sent_ = 0;       // engine
    std::uint64_t sq_completed_ = 0;  // engine

    ReceiveQueue rq_;

    // Requester (engine).
    bool claimed_ = false;    // we are the producer of the peer's ring
    bool link_dead_ = false;  // FaultKind::drop
    std::uint64_t head_ = 0;  // bytes written to the peer's ring
    std::uint64_t published_ = 0;
    std::uint64_t acked_base_ = 0;      // peer's `acked` when the connection began
    std::uint64_t sq_base_ = 0;         // requests before the connection
    std::uint32_t cursor_ = 0;          // bytes of the current message already sent
    std::uint64_t progress_at_ = 0;     // last time the peer was seen to answer, while it owed us
    std::uint64_t local_error_at_ = 0;  // request that failed here before it was sent; 0: none
    ibv_wc_status local_error_ = IBV_WC_SUCCESS;

    // Responder (engine).
    std::uint64_t tail_ = 0;      // bytes of our ring consumed
    std::uint64_t executed_ = 0;  // messages
    std::uint64_t rnr_until_ = 0;
    std::uint64_t rnr_count_ = 0;
    bool deaf_ = false;                // the peer died in mid-message: nothing more comes
    std::vector<Held> held_;           // writes with relaxed ordering that have not landed
    DeviceCopies::Batch landing_ = 0;  // the last copy of these
    std::deque<Moving> moving_;        // packets from the first one on whose bytes are on their way
    EarlyCopies early_;
};

}  // namespace mkernel::nics::softverbs
