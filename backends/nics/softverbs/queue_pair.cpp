#include "backends/nics/softverbs/queue_pair.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"

namespace mkernel::nics::softverbs {
namespace {

bool has(int mask, int wanted) {
    return (mask & wanted) == wanted;
}

// The steps between states, with the attributes that each must and may be given (InfiniBand
// specification, "QP state transition properties"); anything else is refused. ERR takes none. No backend leads
// a queue pair back to RESET: it makes another one.
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
    if (to == IBV_QPS_ERR) return given == 0 && from != IBV_QPS_RESET;
    const auto* step = std::ranges::find_if(
        kSteps, [&](const Step& each) { return each.from == from && each.to == to; });
    return step != std::end(kSteps) && has(given, step->required) &&
           (given & ~(step->required | step->optional)) == 0;
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
}

Ring& Qp::inbound() const {
    return context_.port.ring(index_);
}
Ring& Qp::outbound() const {
    return remote_->ring(ring_of(dest_qp_num_));
}

// ---- posting: any thread

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
        if (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) {
            error = EOPNOTSUPP;
        }
        if (error != 0) break;
        SendRequest& r = sq_[posted % sq_.size()];
        r.source = wr->num_sge != 0 ? *wr->sg_list : ibv_sge{};
        r.inlined = (wr->send_flags & IBV_SEND_INLINE) != 0;
        if (r.inlined) {
            if (r.source.length > cap_.max_inline_data) {
                error = EINVAL;
                break;
            }
            std::copy_n(reinterpret_cast<const std::byte*>(r.source.addr), r.source.length,
                        inline_data_.data() + posted % sq_.size() * cap_.max_inline_data);
        }
        r.wr_id = wr->wr_id;
        r.remote_addr = wr->wr.rdma.remote_addr;
        r.rkey = wr->wr.rdma.rkey;
        r.imm = wr->imm_data;
        r.tells = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        r.signaled = signal_all_ || (wr->send_flags & IBV_SEND_SIGNALED) != 0;
        ++posted;
    }
    if (error != 0 && bad != nullptr) *bad = wr;
    // seq_cst: before the look at the engine's `sleeping`.
    sq_posted_.store(posted, std::memory_order_seq_cst);
    return error;
}

// Sends from the calling thread where the engine sleeps and nobody holds the lock, as a doorbell with the
// request in it does on a card: one thread switch less on the way. The engine is left asleep; the
// acknowledgement wakes it.
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
    const int error = rq_.post(wr, bad, state_, 0, cap_.max_recv_sge);
    // A sleeping engine has nothing to do with a new receive, unless it must flush it. One that
    // waits out a receiver-not-ready timer wakes by itself.
    if (state_.load(std::memory_order_acquire) == IBV_QPS_ERR) context_.wake();
    return error;
}

// ---- state: under the control lock

int Qp::modify(const ibv_qp_attr& attr, int mask) {
    if (has(mask, IBV_QP_CUR_STATE) && attr.cur_qp_state != state) return EINVAL;
    const ibv_qp_state next = has(mask, IBV_QP_STATE) ? attr.qp_state : state;
    const int given = mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
    if (!allowed(state, next, given)) return EINVAL;
    if (has(given, IBV_QP_PKEY_INDEX) && attr.pkey_index != 0) return EINVAL;
    int error = 0;
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
    state = IBV_QPS_RTR;
    inbound().consumer.psn.store(attr.rq_psn, std::memory_order_relaxed);
    inbound().consumer.state.store(RingState::responsive, std::memory_order_release);
    state_.store(state, std::memory_order_release);
    return 0;
}

int Qp::to_rts(const ibv_qp_attr& attr, int mask) {
    if (has(mask, IBV_QP_TIMEOUT)) timeout_ = attr.timeout & 31;
    if (has(mask, IBV_QP_RETRY_CNT)) retry_cnt_ = attr.retry_cnt & 7;
    if (has(mask, IBV_QP_RNR_RETRY)) rnr_retry_ = attr.rnr_retry & 7;
    sq_psn_ = attr.sq_psn;
    state = IBV_QPS_RTS;
    state_.store(state, std::memory_order_release);
    return 0;
}

void Qp::enter_error() {
    if (state == IBV_QPS_ERR) return;
    if (claimed_) outbound().producer.closed.store(1, std::memory_order_release);
    inbound().consumer.state.store(RingState::broken, std::memory_order_seq_cst);
    state = IBV_QPS_ERR;
    state_.store(state, std::memory_order_release);
}

// The ring stays ours: packets that another peer sent there must not mix with it.
void Qp::disconnect() {
    if (claimed_) outbound().producer.closed.store(1, std::memory_order_release);
    remote_.reset();
}

// ---- the engine

bool Qp::step(std::uint64_t now, std::uint64_t& wake_at) {
    bool worked = false;
    if (!context_.mute(now)) {
        if (state == IBV_QPS_RTR || state == IBV_QPS_RTS) worked |= settle();
        if (state == IBV_QPS_RTR || state == IBV_QPS_RTS) worked |= receive(now, wake_at);
        if (state == IBV_QPS_RTS) worked |= take_acks(now);
        if (state == IBV_QPS_RTS) worked |= send(now);
    }
    if (state == IBV_QPS_RTS) check_timers(now, wake_at);
    if (state == IBV_QPS_ERR) worked |= flush_queues();
    return worked;
}

// Applies the faults that fall on the next message; returns whether it may go.
bool Qp::withstands_faults(std::uint64_t now) {
    const auto struck = context_.strike(*static_cast<Cq*>(send_cq), now);
    if (struck.drop) link_dead_ = true;
    if (struck.qp_error) context_.raise_event(IBV_EVENT_QP_FATAL, this, nullptr);
    if (struck.overflow || struck.qp_error) enter_error();
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
    for (; !moving_.empty(); moving_.pop_front()) {
        if (!moving_.front().takes) continue;
        complete_receive(moving_.front().wr_id, IBV_WC_WR_FLUSH_ERR, {});
        worked = true;
    }
    while (!rq_.empty()) {
        complete_receive(rq_.take(), IBV_WC_WR_FLUSH_ERR, {});
        worked = true;
    }
    return worked;
}

}  // namespace mkernel::nics::softverbs
