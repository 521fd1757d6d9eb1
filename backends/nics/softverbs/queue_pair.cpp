#include "backends/nics/softverbs/queue_pair.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"

namespace mkernel::nics::softverbs {
namespace {

// Receiver-not-ready timer codes of the InfiniBand specification, in units of 10 us.
constexpr std::array<std::uint32_t, 32> kRnrTimer = {
    65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
    48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
    2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

constexpr std::uint64_t kTurnBytes = 1024 * 1024;  // executed before the other QPs get their turn
constexpr int kTurnPackets = 64;
constexpr std::uint64_t kWatchNs = 2'000'000;  // how often a peer that owes an answer is looked at

// Vendor codes, ours: what the status alone does not say.
constexpr std::uint32_t kVendorTimeout = 0x81;
constexpr std::uint32_t kVendorNak = 0x82;
constexpr std::uint32_t kVendorLocal = 0x83;

constexpr std::uint32_t align_up(std::uint32_t bytes) {
    return (bytes + kPacketAlign - 1) / kPacketAlign * kPacketAlign;
}

bool has(int mask, int wanted) {
    return (mask & wanted) == wanted;
}

// The steps between states, with the attributes that each must and may be given (InfiniBand
// specification, "QP state transition properties"); anything else is refused. RESET and ERR take none.
struct Step {
    ibv_qp_state from, to;
    int required, optional;
};
constexpr Step kSteps[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER}};

bool allowed(ibv_qp_state from, ibv_qp_state to, int given) {
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) {
        return given == 0 && (to == IBV_QPS_RESET || from != IBV_QPS_RESET);
    }
    const auto* step = std::ranges::find_if(
        kSteps, [&](const Step& each) { return each.from == from && each.to == to; });
    return step != std::end(kSteps) && has(given, step->required) &&
           (given & ~(step->required | step->optional)) == 0;
}

ibv_wc_opcode completed_as(ibv_wr_opcode opcode) {
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_SEND
                                                                   : IBV_WC_RDMA_WRITE;
}

}  // namespace

Qp::Qp(Context& context, const ibv_qp_init_attr& init, std::uint32_t number)
    : ibv_qp{},
      context_(context),
      cap_(init.cap),
      signal_all_(init.sq_sig_all != 0),
      index_(ring_of(number)),
      token_((context.port.address().cookie + std::uint64_t{number} * 0x9e3779b97f4a7c15u) | 1),
      sq_(init.cap.max_send_wr),
      inline_data_(std::size_t{init.cap.max_send_wr} * init.cap.max_inline_data),
      rq_(init.cap.max_recv_wr) {
    ibv_qp::context = &context.context;
    qp_context = init.qp_context;
    send_cq = init.send_cq;
    recv_cq = init.recv_cq;
    qp_num = handle = number;
    state = IBV_QPS_RESET;
    qp_type = IBV_QPT_RC;
    pthread_mutex_init(&mutex, nullptr);
    pthread_cond_init(&cond, nullptr);
    ++static_cast<Cq*>(send_cq)->users;
    ++static_cast<Cq*>(recv_cq)->users;
    context_.port.reset_ring(index_);
    inbound().consumer.state.store(RingState::waiting, std::memory_order_relaxed);
    inbound().consumer.qp_num.store(number, std::memory_order_release);
}

Qp::~Qp() {
    disconnect();
    inbound().consumer.qp_num.store(0, std::memory_order_seq_cst);
    inbound().consumer.state.store(RingState::unused, std::memory_order_seq_cst);
    --static_cast<Cq*>(send_cq)->users;
    --static_cast<Cq*>(recv_cq)->users;
    pthread_cond_destroy(&cond);
    pthread_mutex_destroy(&mutex);
}

Ring& Qp::inbound() const {
    return context_.port.ring(index_);
}
Ring& Qp::outbound() const {
    return remote_->ring(ring_of(dest_qp_num_));
}

// ---- posting: any thread
// -------------------------------------------------------------------------

int Qp::enqueue(ibv_send_wr* wr, ibv_send_wr** bad) {
    const std::lock_guard lock(sq_lock_);
    const int now = state_.load(std::memory_order_acquire);
    std::uint64_t posted = sq_posted_.load(std::memory_order_relaxed);
    int error = 0;
    for (; wr != nullptr; wr = wr->next) {
        if (now != IBV_QPS_RTS && now != IBV_QPS_ERR) error = EINVAL;
        if (posted - sq_reclaimed_.load(std::memory_order_acquire) >= sq_.size()) error = ENOMEM;
        if (wr->num_sge < 0 || static_cast<std::uint32_t>(wr->num_sge) > cap_.max_send_sge) {
            error = EINVAL;
        }
        switch (wr->opcode) {
            case IBV_WR_RDMA_WRITE:
            case IBV_WR_RDMA_WRITE_WITH_IMM:
            case IBV_WR_SEND:
            case IBV_WR_SEND_WITH_IMM:
                break;
            default:
                error = EOPNOTSUPP;
        }
        if (error != 0) break;
        SendRequest& r = sq_[posted % sq_.size()];
        std::uint64_t total = 0;
        for (int i = 0; i < wr->num_sge; ++i) {
            r.sge[i] = wr->sg_list[i];
            total += wr->sg_list[i].length;
        }
        if (total > UINT32_MAX) {
            error = EINVAL;
            break;
        }
        r.inlined = (wr->send_flags & IBV_SEND_INLINE) != 0;
        if (r.inlined) {
            if (total > cap_.max_inline_data) {
                error = EINVAL;
                break;
            }
            std::byte* to = inline_data_.data() + posted % sq_.size() * cap_.max_inline_data;
            for (int i = 0; i < wr->num_sge; ++i) {
                std::memcpy(to, reinterpret_cast<const void*>(r.sge[i].addr), r.sge[i].length);
                to += r.sge[i].length;
            }
        }
        r.wr_id = wr->wr_id;
        r.remote_addr = wr->wr.rdma.remote_addr;
        r.rkey = wr->wr.rdma.rkey;
        r.imm = wr->imm_data;
        r.total = static_cast<std::uint32_t>(total);
        r.pieces = static_cast<std::uint16_t>(wr->num_sge);
        r.signaled = signal_all_ || (wr->send_flags & IBV_SEND_SIGNALED) != 0;
        r.solicited = (wr->send_flags & IBV_SEND_SOLICITED) != 0;
        r.opcode = wr->opcode;
        ++posted;
    }
    if (error != 0 && bad != nullptr) *bad = wr;
    // seq_cst: before the look at the engine's `sleeping`.
    sq_posted_.store(posted, std::memory_order_seq_cst);
    return error;
}

// Where the engine sleeps and nobody holds the lock, the caller sends by itself, as a doorbell with
// the request in it does on a card: one thread switch less on the way. The engine is left asleep;
// the acknowledgement wakes it.
int Qp::post_send(ibv_send_wr* wr, ibv_send_wr** bad) {
    const int error = enqueue(wr, bad);
    if (context_.port.header().sleeping.load(std::memory_order_seq_cst) == 0) return error;
    std::unique_lock lock(context_.control, std::try_to_lock);
    if (lock.owns_lock() && state == IBV_QPS_RTS) {
        send(now_ns());
        if (sq_sent_ == sq_posted_.load(std::memory_order_relaxed)) return error;
    }
    if (lock.owns_lock()) lock.unlock();
    context_.wake();
    return error;
}

int Qp::post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad) {
    const std::lock_guard lock(rq_lock_);
    const int now = state_.load(std::memory_order_acquire);
    std::uint64_t posted = rq_posted_.load(std::memory_order_relaxed);
    int error = 0;
    for (; wr != nullptr; wr = wr->next) {
        if (now == IBV_QPS_RESET) error = EINVAL;
        if (posted - rq_taken_.load(std::memory_order_acquire) >= rq_.size()) error = ENOMEM;
        if (wr->num_sge < 0 || static_cast<std::uint32_t>(wr->num_sge) > cap_.max_recv_sge) {
            error = EINVAL;
        }
        if (error != 0) break;
        ReceiveRequest& r = rq_[posted % rq_.size()];
        r.wr_id = wr->wr_id;
        r.pieces = static_cast<std::uint32_t>(wr->num_sge);
        std::copy_n(wr->sg_list, wr->num_sge, r.sge);
        ++posted;
    }
    if (error != 0 && bad != nullptr) *bad = wr;
    rq_posted_.store(posted, std::memory_order_seq_cst);
    // A sleeping engine has nothing to do with a new receive, unless it must flush it. One that
    // waits out a receiver-not-ready timer wakes by itself.
    if (now == IBV_QPS_ERR) context_.wake();
    return error;
}

// ---- state: under the control lock
// -----------------------------------------------------------------

int Qp::modify(const ibv_qp_attr& attr, int mask) {
    if (has(mask, IBV_QP_CUR_STATE) && attr.cur_qp_state != state) return EINVAL;
    const ibv_qp_state next = has(mask, IBV_QP_STATE) ? attr.qp_state : state;
    const int given = mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
    if (!allowed(state, next, given)) return EINVAL;
    if (has(given, IBV_QP_PKEY_INDEX) && attr.pkey_index != 0) return EINVAL;
    int error = 0;
    if (next == IBV_QPS_RESET) to_reset();
    if (next == IBV_QPS_ERR) enter_error();
    if (next == IBV_QPS_INIT) error = to_init(attr, given);
    if (next == IBV_QPS_RTR) error = to_rtr(attr);
    if (next == IBV_QPS_RTS) error = to_rts(attr, given);
    if (error != 0) return error;
    if (has(given, IBV_QP_ACCESS_FLAGS)) access_ = attr.qp_access_flags;
    if (has(given, IBV_QP_MIN_RNR_TIMER)) min_rnr_timer_ = attr.min_rnr_timer & 31;
    return 0;
}

int Qp::to_init(const ibv_qp_attr& attr, int mask) {
    if (has(mask, IBV_QP_PORT) && attr.port_num != 1) return EINVAL;
    state = IBV_QPS_INIT;
    state_.store(state, std::memory_order_release);
    return 0;
}

int Qp::to_rtr(const ibv_qp_attr& attr) {
    // An Ethernet port routes by GID only.
    if (attr.ah_attr.is_global == 0 || attr.ah_attr.port_num != 1) return EINVAL;
    if (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > IBV_MTU_4096) return EINVAL;
    PortAddress address;
    if (!decode_gid(attr.ah_attr.grh.dgid, address)) return EHOSTUNREACH;
    try {
        remote_ = context_.connect(address);
    } catch (const std::system_error& error) {
        return error.code().value();
    }
    dest_qp_num_ = attr.dest_qp_num;
    dest_gid_ = attr.ah_attr.grh.dgid;
    mtu_ = attr.path_mtu;
    state = IBV_QPS_RTR;
    inbound().consumer.state.store(RingState::responsive, std::memory_order_release);
    state_.store(state, std::memory_order_release);
    return 0;
}

int Qp::to_rts(const ibv_qp_attr& attr, int mask) {
    if (has(mask, IBV_QP_TIMEOUT)) timeout_ = attr.timeout & 31;
    if (has(mask, IBV_QP_RETRY_CNT)) retry_cnt_ = attr.retry_cnt & 7;
    if (has(mask, IBV_QP_RNR_RETRY)) rnr_retry_ = attr.rnr_retry & 7;
    state = IBV_QPS_RTS;
    state_.store(state, std::memory_order_release);
    return 0;
}

void Qp::to_reset() {
    disconnect();
    static_cast<Cq*>(send_cq)->forget(this);
    static_cast<Cq*>(recv_cq)->forget(this);
    const std::scoped_lock lock(sq_lock_, rq_lock_);
    state = IBV_QPS_RESET;
    state_.store(state, std::memory_order_release);
    sq_completed_ = sq_sent_ = sq_posted_.load(std::memory_order_relaxed);
    sq_reclaimed_.store(sq_sent_, std::memory_order_relaxed);
    rq_taken_.store(rq_posted_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    cursor_ = placed_ = 0;
    local_error_at_ = progress_at_ = rnr_until_ = rnr_count_ = 0;
    receiving_ = deaf_ = link_dead_ = false;
    Ring& ring = inbound();
    tail_ = ring.producer.head.load(std::memory_order_acquire);
    ring.consumer.nak.store(0, std::memory_order_relaxed);
    ring.consumer.rnr.store(0, std::memory_order_relaxed);
    ring.consumer.state.store(RingState::waiting, std::memory_order_relaxed);
    ring.consumer.tail.store(tail_, std::memory_order_release);
    ring.producer.closed.store(0, std::memory_order_relaxed);
    ring.producer.owner.store(0, std::memory_order_release);
}

void Qp::enter_error() {
    if (state == IBV_QPS_ERR) return;
    if (claimed_) outbound().producer.closed.store(1, std::memory_order_release);
    inbound().consumer.state.store(RingState::broken, std::memory_order_seq_cst);
    state = IBV_QPS_ERR;
    state_.store(state, std::memory_order_release);
}

// The ring stays ours until its owner resets it: what another sent there must not mix with it.
void Qp::disconnect() {
    if (claimed_) outbound().producer.closed.store(1, std::memory_order_release);
    claimed_ = false;
    remote_.reset();
}

void Qp::query(ibv_qp_attr& attr, ibv_qp_init_attr& init) const {
    attr = {};
    attr.qp_state = attr.cur_qp_state = state;
    attr.path_mtu = mtu_;
    attr.dest_qp_num = dest_qp_num_;
    attr.qp_access_flags = access_;
    attr.cap = cap_;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = dest_gid_;
    attr.port_num = 1;
    attr.timeout = timeout_;
    attr.retry_cnt = retry_cnt_;
    attr.rnr_retry = rnr_retry_;
    attr.min_rnr_timer = min_rnr_timer_;
    init = {};
    init.qp_context = qp_context;
    init.send_cq = send_cq;
    init.recv_cq = recv_cq;
    init.cap = cap_;
    init.qp_type = qp_type;
    init.sq_sig_all = signal_all_ ? 1 : 0;
}

// ---- the engine
// ------------------------------------------------------------------------------------

bool Qp::step(std::uint64_t now, std::uint64_t& wake_at) {
    bool worked = false;
    if (!context_.mute(now)) {
        if (state == IBV_QPS_RTR || state == IBV_QPS_RTS) worked |= receive(now, wake_at);
        if (state == IBV_QPS_RTS) worked |= take_acks(now);
        if (state == IBV_QPS_RTS) worked |= send(now);
    }
    if (state == IBV_QPS_RTS) check_timers(now, wake_at);
    if (state == IBV_QPS_ERR) worked |= flush_queues();
    return worked;
}

void Qp::push(Cq* queue, const Cq::Entry& entry, bool solicited) {
    const bool before = queue->overrun.load(std::memory_order_relaxed);
    if (queue->push(entry, solicited) || before) return;
    context_.raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
    enter_error();
}

// What falls on the next message; whether it may go.
bool Qp::withstands_faults(std::uint64_t now) {
    Faults& faults = context_.faults;
    if (faults.none()) return true;
    faults.begin_counted(now);
    if (faults.strikes(FaultKind::drop, now)) link_dead_ = true;
    if (faults.strikes(FaultKind::cq_overflow, now)) {
        auto* queue = static_cast<Cq*>(send_cq);
        queue->overrun.store(true, std::memory_order_relaxed);
        context_.raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
        enter_error();
    }
    if (faults.strikes(FaultKind::qp_error, now)) {
        context_.raise_event(IBV_EVENT_QP_FATAL, this, nullptr);
        enter_error();
    }
    return !link_dead_ && state == IBV_QPS_RTS && !context_.mute(now);
}

bool Qp::flush_queues() {
    bool worked = false;
    const std::uint64_t posted = sq_posted_.load(std::memory_order_seq_cst);
    while (sq_completed_ < posted) {
        complete_send(++sq_completed_, IBV_WC_WR_FLUSH_ERR, 0);
        worked = true;
    }
    sq_sent_ = sq_completed_;
    Packet none;
    if (receiving_) {
        receiving_ = false;
        complete_receive(current_, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, none);
    }
    while (rq_taken_.load(std::memory_order_relaxed) < rq_posted_.load(std::memory_order_seq_cst)) {
        complete_receive(take_receive(), IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, none);
        worked = true;
    }
    return worked;
}

// ---- requester
// ---------------------------------------------------------------------------------------

bool Qp::claim() {
    if (claimed_) return true;
    Ring& ring = outbound();
    if (ring.consumer.qp_num.load(std::memory_order_acquire) != dest_qp_num_) return false;
    std::uint64_t nobody = 0;
    if (!ring.producer.owner.compare_exchange_strong(nobody, token_)) return false;
    head_ = published_ = ring.producer.head.load(std::memory_order_relaxed);
    acked_base_ = ring.consumer.acked.load(std::memory_order_acquire);
    sq_base_ = sq_completed_;
    claimed_ = true;
    return true;
}

bool Qp::sound(const SendRequest& r) {
    local_error_ = IBV_WC_SUCCESS;
    if (r.total > context_.config.max_message) local_error_ = IBV_WC_LOC_LEN_ERR;
    for (std::uint32_t i = 0; i < r.pieces && !r.inlined; ++i) {
        const Mr* mr = context_.regions.find(r.sge[i].lkey);
        if (r.sge[i].length == 0) continue;
        if (mr == nullptr || mr->pd != pd || !mr->contains(r.sge[i].addr, r.sge[i].length)) {
            local_error_ = IBV_WC_LOC_PROT_ERR;
        }
    }
    return local_error_ == IBV_WC_SUCCESS;
}

bool Qp::send(std::uint64_t now) {
    const std::uint64_t posted = sq_posted_.load(std::memory_order_seq_cst);
    if (sq_sent_ == posted || local_error_at_ != 0 || link_dead_ || !claim()) return false;
    bool worked = false;
    while (sq_sent_ < posted) {
        if (!withstands_faults(now)) break;
        const SendRequest& r = sq_[sq_sent_ % sq_.size()];
        if (!sound(r)) {
            local_error_at_ = sq_sent_ + 1;
            worked = true;
            break;
        }
        if (!send_message(r, now)) break;
        ++sq_sent_;
        cursor_ = 0;
        context_.faults.count_message();
    }
    if (head_ != published_) {
        published_ = head_;
        outbound().producer.head.store(head_, std::memory_order_seq_cst);
        ring_doorbell(remote_->header());
        worked = true;
    }
    return worked;
}

// Contiguous room in the peer's ring, or null while it is full.
std::byte* Qp::reserve(std::uint32_t bytes) {
    Ring& ring = outbound();
    const std::uint64_t free =
        kRingBytes - (head_ - ring.consumer.tail.load(std::memory_order_acquire));
    const auto at = static_cast<std::uint32_t>(head_ % kRingBytes);
    const std::uint32_t to_end = kRingBytes - at;
    if (bytes <= to_end) return bytes <= free ? ring.data + at : nullptr;
    if (to_end + bytes > free) return nullptr;
    Packet pad;
    pad.bytes = to_end;
    std::memcpy(ring.data + at, &pad, sizeof(pad));
    head_ += to_end;
    return ring.data;
}

bool Qp::send_message(const SendRequest& r, std::uint64_t now) {
    do {
        // The piece of the scatter list that the cursor stands in.
        std::uint32_t piece = 0;
        std::uint32_t skipped = 0;
        std::uint32_t length = 0;
        const std::byte* source = nullptr;
        const Backing* backing = nullptr;
        std::uint64_t ref_offset = 0;
        if (r.total != 0 && r.inlined) {
            source = inline_data_.data() + sq_sent_ % sq_.size() * cap_.max_inline_data + cursor_;
            length = r.total - cursor_;
        } else if (r.total != 0) {
            while (cursor_ - skipped >= r.sge[piece].length) skipped += r.sge[piece++].length;
            const ibv_sge& sge = r.sge[piece];
            const Mr* mr = context_.regions.find(sge.lkey);
            const std::uint32_t inside = cursor_ - skipped;
            source = reinterpret_cast<const std::byte*>(sge.addr + inside);
            length = sge.length - inside;
            if (context_.config.by_reference && length >= kReferenceFrom && mr->backing) {
                backing = &*mr->backing;
                ref_offset =
                    backing->offset + sge.addr + inside - reinterpret_cast<std::uint64_t>(mr->addr);
            }
        }
        length = std::min(length, backing != nullptr ? kMaxReference : kMaxPayload);
        Packet p;
        p.bytes = static_cast<std::uint32_t>(sizeof(Packet)) +
                  (backing != nullptr ? 0 : align_up(length));
        std::byte* at = reserve(p.bytes);
        if (at == nullptr) return false;
        const bool imm = r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || r.opcode == IBV_WR_SEND_WITH_IMM;
        const bool write = r.opcode == IBV_WR_RDMA_WRITE || r.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        p.opcode = write ? (imm ? Opcode::write_imm : Opcode::write)
                         : (imm ? Opcode::send_imm : Opcode::send);
        p.arrival = context_.link.depart(now, length);
        p.remote_addr = r.remote_addr + cursor_;
        p.rkey = r.rkey;
        p.imm = r.imm;
        p.length = length;
        p.total = r.total;
        if (cursor_ == 0) p.flags |= kFirst;
        if (cursor_ + length == r.total) p.flags |= kLast;
        if (r.solicited) p.flags |= kSolicited;
        if (backing != nullptr) {
            p.flags |= kReference;
            p.ref_fd = backing->fd.get();
            p.ref_inode = backing->inode;
            p.ref_offset = ref_offset;
        } else if (length != 0) {
            std::memcpy(at + sizeof(Packet), source, length);
        }
        std::memcpy(at, &p, sizeof(p));
        head_ += p.bytes;
        cursor_ += length;
    } while (cursor_ < r.total);
    return true;
}

void Qp::complete_send(std::uint64_t number, ibv_wc_status status, std::uint32_t vendor_err) {
    const SendRequest& r = sq_[(number - 1) % sq_.size()];
    if (status == IBV_WC_SUCCESS && !r.signaled) return;
    Cq::Entry entry{};
    entry.wc.wr_id = r.wr_id;
    entry.wc.status = status;
    entry.wc.opcode = completed_as(r.opcode);
    entry.wc.vendor_err = vendor_err;
    entry.wc.byte_len = r.total;
    entry.wc.qp_num = qp_num;
    entry.qp = this;
    entry.reclaim_to = number;
    push(static_cast<Cq*>(send_cq), entry, status != IBV_WC_SUCCESS);
}

void Qp::fail_send(std::uint64_t number, ibv_wc_status status, std::uint32_t vendor_err) {
    sq_completed_ = number;
    complete_send(number, status, vendor_err);
    enter_error();
}

bool Qp::take_acks(std::uint64_t now) {
    if (!claimed_) return false;
    bool worked = false;
    Ring& ring = outbound();
    // The refusal is read first: everything executed before it is then in `acked`.
    const std::uint64_t nak = ring.consumer.nak.load(std::memory_order_acquire);
    const std::uint64_t rnr = ring.consumer.rnr.load(std::memory_order_acquire);
    const std::uint64_t acked = ring.consumer.acked.load(std::memory_order_acquire);
    const std::uint64_t done = sq_base_ + (acked - acked_base_);
    while (sq_completed_ < done && sq_completed_ < sq_sent_) {
        complete_send(++sq_completed_, IBV_WC_SUCCESS, 0);
        worked = true;
    }
    if (worked) progress_at_ = now;
    if (state != IBV_QPS_RTS) return true;
    const std::uint64_t next = acked + 1;  // in the ring's count
    if (nak != 0 && nak >> 8 == next) {
        fail_send(sq_completed_ + 1, static_cast<ibv_wc_status>(nak & 0xff), kVendorNak);
        return true;
    }
    if (rnr != 0 && rnr >> 8 == next && rnr_retry_ != 7 && (rnr & 0xff) > rnr_retry_) {
        fail_send(sq_completed_ + 1, IBV_WC_RNR_RETRY_EXC_ERR, kVendorNak);
        return true;
    }
    if (local_error_at_ != 0 && local_error_at_ == sq_completed_ + 1) {
        fail_send(local_error_at_, local_error_, kVendorLocal);
        return true;
    }
    return worked;
}

// A card does not share its host's scheduler, so a live peer whose engine is late has not lost
// anything: only a peer that is gone, or a queue pair that does not listen, runs into time-outs.
bool Qp::peer_responsive(std::uint64_t now) {
    if (link_dead_ || context_.mute(now) || !remote_->alive(now) || !claim() ||
        remote_->header().silent.load(std::memory_order_acquire) != 0) {
        return false;
    }
    const auto& consumer = outbound().consumer;
    return consumer.qp_num.load(std::memory_order_acquire) == dest_qp_num_ &&
           consumer.state.load(std::memory_order_acquire) == RingState::responsive;
}

void Qp::check_timers(std::uint64_t now, std::uint64_t& wake_at) {
    if (sq_completed_ == sq_posted_.load(std::memory_order_relaxed)) {
        progress_at_ = 0;
        return;
    }
    if (progress_at_ == 0 || peer_responsive(now)) {
        progress_at_ = now;
        wake_at = std::min(wake_at, now + kWatchNs);
        return;
    }
    if (timeout_ == 0) return;  // waits for ever, as the specification has it
    const std::uint64_t budget = (std::uint64_t{4096} << timeout_) * (retry_cnt_ + 1u);
    if (now >= progress_at_ + budget) {
        fail_send(sq_completed_ + 1, IBV_WC_RETRY_EXC_ERR, kVendorTimeout);
        wake_at = now;
        return;
    }
    wake_at = std::min(wake_at, std::min(progress_at_ + budget, now + kWatchNs));
}

// ---- responder
// ---------------------------------------------------------------------------------------

bool Qp::receive(std::uint64_t now, std::uint64_t& wake_at) {
    Ring& ring = inbound();
    const std::uint64_t head = ring.producer.head.load(std::memory_order_seq_cst);
    if (tail_ == head || deaf_) return false;
    const std::uint64_t before = tail_;
    std::uint64_t moved = 0;
    for (int n = 0; tail_ != head && n < kTurnPackets && moved < kTurnBytes; ++n) {
        if (ring.producer.closed.load(std::memory_order_acquire) != 0) break;
        const std::byte* at = ring.data + tail_ % kRingBytes;
        Packet p;
        std::memcpy(&p, at, sizeof(p));
        const std::uint32_t payload = (p.flags & kReference) != 0 ? 0 : p.length;
        if (p.bytes < sizeof(Packet) || p.bytes % kPacketAlign != 0 ||
            p.bytes > kRingBytes - tail_ % kRingBytes || p.bytes - sizeof(Packet) < payload) {
            refuse(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
            break;
        }
        if (p.opcode != Opcode::pad) {
            if (!context_.link.arrived(p.arrival, now, wake_at)) break;
            if (!execute(p, at + sizeof(Packet), now, wake_at)) break;
            context_.link.take(p.arrival, p.length);
            if ((p.flags & kLast) != 0) {
                ++executed_;
                placed_ = 0;
            }
            moved += p.length;
        }
        tail_ += p.bytes;
    }
    land();
    if (tail_ == before) return state == IBV_QPS_ERR;
    publish_executed();
    return true;
}

void Qp::publish_executed() {
    auto& consumer = inbound().consumer;
    consumer.tail.store(tail_, std::memory_order_release);
    consumer.acked.store(executed_, std::memory_order_seq_cst);
    ring_doorbell(remote_->header());
}

void Qp::refuse(ibv_wc_status at_requester, ibv_event_type event) {
    auto& consumer = inbound().consumer;
    consumer.acked.store(executed_, std::memory_order_release);
    consumer.nak.store(((executed_ + 1) << 8) | static_cast<std::uint64_t>(at_requester),
                       std::memory_order_seq_cst);
    context_.raise_event(event, this, nullptr);
    enter_error();
    ring_doorbell(remote_->header());
}

bool Qp::may_write(const Packet& p) const {
    if (p.total == 0) return true;
    const Mr* mr = context_.regions.find(p.rkey);
    const bool first = (p.flags & kFirst) != 0;
    return mr != nullptr && mr->pd == pd && (mr->access & IBV_ACCESS_REMOTE_WRITE) != 0 &&
           mr->contains(p.remote_addr, first ? p.total : p.length);
}

bool Qp::have_receive(std::uint64_t now, std::uint64_t& wake_at) {
    if (now < rnr_until_) {
        wake_at = std::min(wake_at, rnr_until_);
        return false;
    }
    if (rq_taken_.load(std::memory_order_relaxed) != rq_posted_.load(std::memory_order_seq_cst)) {
        rnr_until_ = rnr_count_ = 0;
        return true;
    }
    rnr_count_ = std::min<std::uint64_t>(rnr_count_ + 1, 0xff);
    rnr_until_ = now + std::uint64_t{kRnrTimer[min_rnr_timer_]} * 10'000;
    wake_at = std::min(wake_at, rnr_until_);
    auto& consumer = inbound().consumer;
    consumer.acked.store(executed_, std::memory_order_release);
    consumer.rnr.store(((executed_ + 1) << 8) | rnr_count_, std::memory_order_seq_cst);
    ring_doorbell(remote_->header());
    return false;
}

ReceiveRequest Qp::take_receive() {
    const std::uint64_t number = rq_taken_.load(std::memory_order_relaxed);
    const ReceiveRequest taken = rq_[number % rq_.size()];
    rq_taken_.store(number + 1, std::memory_order_release);
    return taken;
}

void Qp::complete_receive(const ReceiveRequest& request, ibv_wc_status status, ibv_wc_opcode opcode,
                          const Packet& p) {
    Cq::Entry entry{};
    entry.wc.wr_id = request.wr_id;
    entry.wc.status = status;
    entry.wc.opcode = opcode;
    entry.wc.byte_len = p.total;
    entry.wc.qp_num = qp_num;
    entry.wc.src_qp = dest_qp_num_;
    if (p.opcode == Opcode::write_imm || p.opcode == Opcode::send_imm) {
        entry.wc.imm_data = p.imm;
        entry.wc.wc_flags = IBV_WC_WITH_IMM;
    }
    entry.qp = this;
    push(static_cast<Cq*>(recv_cq), entry, (p.flags & kSolicited) != 0 || status != IBV_WC_SUCCESS);
}

bool Qp::execute(const Packet& p, const std::byte* payload, std::uint64_t now,
                 std::uint64_t& wake_at) {
    const bool write = p.opcode == Opcode::write || p.opcode == Opcode::write_imm;
    const bool send = p.opcode == Opcode::send || p.opcode == Opcode::send_imm;
    const bool last = (p.flags & kLast) != 0;
    if ((!write && !send) || (write && (access_ & IBV_ACCESS_REMOTE_WRITE) == 0)) {
        refuse(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
        return false;
    }
    if (write && !may_write(p)) {
        refuse(IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
        return false;
    }
    const bool takes = send ? (p.flags & kFirst) != 0 : last && p.opcode == Opcode::write_imm;
    if (takes && !have_receive(now, wake_at)) return false;

    const std::byte* source = source_of(p, payload);
    if (source == nullptr) {
        // A peer that was killed takes its memory along: silence, as from a dead card.
        deaf_ = !remote_->alive(now + 2'000'000);
        if (!deaf_) refuse(IBV_WC_REM_OP_ERR, IBV_EVENT_QP_REQ_ERR);
        return false;
    }
    if (write) {
        if (p.length != 0 && relaxed(p)) {
            held_.push_back({p, payload});
        } else if (p.length != 0) {
            place_bytes(context_.config, p.remote_addr, source, p.length);
        }
        if (takes) land();
        if (takes) complete_receive(take_receive(), IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM, p);
        return true;
    }
    if (takes) {
        current_ = take_receive();
        receiving_ = true;
    }
    if (!scatter(p, source)) return false;
    if (last) {
        receiving_ = false;
        complete_receive(current_, IBV_WC_SUCCESS, IBV_WC_RECV, p);
    }
    return true;
}

const std::byte* Qp::source_of(const Packet& p, const std::byte* payload) const {
    if ((p.flags & kReference) == 0) return payload;
    return remote_->reference(p.ref_fd, p.ref_inode, p.ref_offset, p.length);
}

bool Qp::relaxed(const Packet& p) const {
    const Mr* mr = context_.regions.find(p.rkey);
    return context_.config.relaxed ||
           (mr != nullptr && (mr->access & IBV_ACCESS_RELAXED_ORDERING) != 0);
}

// What was held back, in any order. Memory that its sender took away meanwhile is left out.
void Qp::land() {
    std::shuffle(held_.begin(), held_.end(), context_.random);
    for (const auto& [p, payload] : held_) {
        const std::byte* source = source_of(p, payload);
        if (source != nullptr) place_bytes(context_.config, p.remote_addr, source, p.length);
    }
    held_.clear();
}

// A SEND's bytes into the receive's pieces.
bool Qp::scatter(const Packet& p, const std::byte* source) {
    std::uint64_t room = 0;
    ibv_wc_status status = IBV_WC_SUCCESS;
    for (std::uint32_t i = 0; i < current_.pieces; ++i) {
        const ibv_sge& sge = current_.sge[i];
        room += sge.length;
        const Mr* mr = context_.regions.find(sge.lkey);
        if (sge.length != 0 &&
            (mr == nullptr || mr->pd != pd || (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0 ||
             !mr->contains(sge.addr, sge.length))) {
            status = IBV_WC_LOC_PROT_ERR;
        }
    }
    if (p.total > room) status = IBV_WC_LOC_LEN_ERR;
    if (status != IBV_WC_SUCCESS) {
        receiving_ = false;
        complete_receive(current_, status, IBV_WC_RECV, p);
        refuse(status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR,
               IBV_EVENT_QP_REQ_ERR);
        return false;
    }
    std::uint32_t left = p.length;
    std::uint32_t skip = placed_;
    for (std::uint32_t i = 0; i < current_.pieces && left != 0; ++i) {
        const ibv_sge& sge = current_.sge[i];
        if (skip >= sge.length) {
            skip -= sge.length;
            continue;
        }
        const std::uint32_t here = std::min(left, sge.length - skip);
        place_bytes(context_.config, sge.addr + skip, source, here);
        source += here;
        left -= here;
        placed_ += here;
        skip = 0;
    }
    return true;
}

}  // namespace mkernel::nics::softverbs
