#include "backends/nics/softverbs/srd.hpp"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"

namespace mkernel::nics::softverbs {
namespace {

constexpr std::size_t kPlacements = 96;  // packets that wait for their turn to be placed
constexpr std::uint64_t kLate = 25;      // a second placement in eight is held so much longer
constexpr std::uint64_t kRnrNs = 20'000'000;
constexpr std::uint64_t kWatchNs = 2'000'000;
constexpr std::uint64_t kTurnBytes = 1024 * 1024;
constexpr int kTurnPackets = 128;

// Vendor codes, ours: what the status alone does not say.
constexpr std::uint32_t kVendorTimeout = 0x91;
constexpr std::uint32_t kVendorRefused = 0x92;
constexpr std::uint32_t kVendorLocal = 0x93;

bool has(int mask, int wanted) {
    return (mask & wanted) == wanted;
}
bool is_write(Opcode opcode) {
    return opcode == Opcode::write || opcode == Opcode::write_imm;
}
bool takes_receive(Opcode opcode) {
    return opcode != Opcode::write;
}
bool runs(std::int32_t pid) {
    return ::kill(pid, 0) == 0 || errno != ESRCH;
}
constexpr std::uint32_t align_up(std::uint32_t bytes) {
    return (bytes + kPacketAlign - 1) / kPacketAlign * kPacketAlign;
}

// ---- the table of an extended queue pair

void wr_start(ibv_qp_ex* qp) {
    SrdQp::of(qp).start();
}
int wr_complete(ibv_qp_ex* qp) {
    return SrdQp::of(qp).complete();
}
void wr_abort(ibv_qp_ex* qp) {
    SrdQp::of(qp).abort();
}
void wr_rdma_write(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t remote) {
    SrdQp::of(qp).begin(Opcode::write, rkey, remote, 0);
}
void wr_rdma_write_imm(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t remote, __be32 imm) {
    SrdQp::of(qp).begin(Opcode::write_imm, rkey, remote, imm);
}
void wr_send(ibv_qp_ex* qp) {
    SrdQp::of(qp).begin(Opcode::send, 0, 0, 0);
}
void wr_send_imm(ibv_qp_ex* qp, __be32 imm) {
    SrdQp::of(qp).begin(Opcode::send_imm, 0, 0, imm);
}
void wr_set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t qpn, std::uint32_t queue_key) {
    SrdQp::of(qp).set_address(ah, qpn, queue_key);
}
void wr_set_sge(ibv_qp_ex* qp, std::uint32_t lkey, std::uint64_t address, std::uint32_t length) {
    const ibv_sge sge{address, length, lkey};
    SrdQp::of(qp).set_sge(1, &sge);
}
void wr_set_sge_list(ibv_qp_ex* qp, std::size_t count, const ibv_sge* list) {
    SrdQp::of(qp).set_sge(count, list);
}
void wr_set_inline_data(ibv_qp_ex* qp, void* address, std::size_t length) {
    const ibv_data_buf buffer{address, length};
    SrdQp::of(qp).set_inline(1, &buffer);
}
void wr_set_inline_data_list(ibv_qp_ex* qp, std::size_t count, const ibv_data_buf* list) {
    SrdQp::of(qp).set_inline(count, list);
}

}  // namespace

SrdQp::SrdQp(Context& context, const ibv_qp_init_attr_ex& init, std::uint32_t number)
    : ibv_qp_ex{},
      context_(context),
      cap_(init.cap),
      signal_all_(init.sq_sig_all != 0),
      sq_(init.cap.max_send_wr),
      rq_(init.cap.max_recv_wr) {
    qp_base.context = &context.context;
    qp_base.qp_context = init.qp_context;
    qp_base.pd = init.pd;
    qp_base.send_cq = init.send_cq;
    qp_base.recv_cq = init.recv_cq;
    qp_base.qp_num = qp_base.handle = number;
    qp_base.state = IBV_QPS_RESET;
    qp_base.qp_type = IBV_QPT_DRIVER;
    pthread_mutex_init(&qp_base.mutex, nullptr);
    pthread_cond_init(&qp_base.cond, nullptr);
    ibv_qp_ex::wr_start = softverbs::wr_start;
    ibv_qp_ex::wr_complete = softverbs::wr_complete;
    ibv_qp_ex::wr_abort = softverbs::wr_abort;
    ibv_qp_ex::wr_set_ud_addr = softverbs::wr_set_ud_addr;
    ibv_qp_ex::wr_set_sge = softverbs::wr_set_sge;
    ibv_qp_ex::wr_set_sge_list = softverbs::wr_set_sge_list;
    ibv_qp_ex::wr_set_inline_data = softverbs::wr_set_inline_data;
    ibv_qp_ex::wr_set_inline_data_list = softverbs::wr_set_inline_data_list;
    // As in a driver: what was not asked for at creation is not there.
    const auto ops = init.send_ops_flags;
    if ((ops & IBV_QP_EX_WITH_RDMA_WRITE) != 0) ibv_qp_ex::wr_rdma_write = softverbs::wr_rdma_write;
    if ((ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) != 0) {
        ibv_qp_ex::wr_rdma_write_imm = softverbs::wr_rdma_write_imm;
    }
    if ((ops & IBV_QP_EX_WITH_SEND) != 0) ibv_qp_ex::wr_send = softverbs::wr_send;
    if ((ops & IBV_QP_EX_WITH_SEND_WITH_IMM) != 0) {
        ibv_qp_ex::wr_send_imm = softverbs::wr_send_imm;
    }
    ++static_cast<Cq*>(qp_base.send_cq)->users;
    ++static_cast<Cq*>(qp_base.recv_cq)->users;
}

SrdQp::~SrdQp() {
    --static_cast<Cq*>(qp_base.send_cq)->users;
    --static_cast<Cq*>(qp_base.recv_cq)->users;
    pthread_cond_destroy(&qp_base.cond);
    pthread_mutex_destroy(&qp_base.mutex);
}

// ---- posting: any thread

void SrdQp::start() {
    sq_lock_.lock();
    staged_ = posted_.load(std::memory_order_relaxed);
    error_ = 0;
    current_ = nullptr;
}

void SrdQp::begin(Opcode opcode, std::uint32_t rkey, std::uint64_t remote, std::uint32_t imm) {
    current_ = nullptr;
    if (error_ != 0) return;
    const int state = state_.load(std::memory_order_acquire);
    const bool signaled = signal_all_ || (wr_flags & IBV_SEND_SIGNALED) != 0;
    const std::size_t most = context_.config.srd_queue;
    const std::size_t room = most != 0 ? std::min(most, sq_.size()) : sq_.size();
    if (staged_ - reclaimed_.load(std::memory_order_acquire) >= room) {
        error_ = ENOMEM;
    } else if ((state != IBV_QPS_RTS && state != IBV_QPS_ERR) || !signaled ||
               (wr_flags & ~unsigned{IBV_SEND_SIGNALED | IBV_SEND_INLINE}) != 0) {
        error_ = EINVAL;
    }
    if (error_ != 0) return;
    current_ = &sq_[staged_++ % sq_.size()];
    *current_ = {};
    current_->wr_id = wr_id;
    current_->opcode = opcode;
    current_->rkey = rkey;
    current_->remote_addr = remote;
    current_->imm = imm;
    current_->inlined = (wr_flags & IBV_SEND_INLINE) != 0;
}

void SrdQp::set_address(ibv_ah* ah, std::uint32_t qpn, std::uint32_t key) {
    if (error_ != 0) return;
    if (current_ == nullptr || ah == nullptr || ah->pd != qp_base.pd || qpn > 0xffff) {
        error_ = EINVAL;
        return;
    }
    current_->peer = static_cast<AddressHandle*>(ah)->address;
    current_->qpn = qpn;
    current_->queue_key = key;
    current_->addressed = true;
}

// The request that data is set for, if such data may be.
SrdRequest* SrdQp::staging(bool inline_data) {
    if (error_ == 0 && (current_ == nullptr || current_->inlined != inline_data)) error_ = EINVAL;
    return error_ == 0 ? current_ : nullptr;
}

void SrdQp::set_sge(std::size_t count, const ibv_sge* list) {
    SrdRequest* r = staging(false);
    if (r == nullptr) return;
    const std::size_t most =
        is_write(r->opcode) ? kSrdRdmaSge : std::min(kSrdSendSge, cap_.max_send_sge);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count && i < most; ++i) {
        r->sge[i] = list[i];
        total += list[i].length;
    }
    if (count > most || total > UINT32_MAX) {
        error_ = EINVAL;
        return;
    }
    r->pieces = static_cast<std::uint32_t>(count);
    r->total = static_cast<std::uint32_t>(total);
}

// Inline data goes with SENDs alone.
void SrdQp::set_inline(std::size_t count, const ibv_data_buf* buffers) {
    SrdRequest* r = staging(true);
    if (r == nullptr) return;
    std::size_t total = 0;
    for (std::size_t i = 0; i < count && error_ == 0; ++i) {
        if (is_write(r->opcode) ||
            buffers[i].length > std::min(kSrdInline, cap_.max_inline_data) - total) {
            error_ = EINVAL;
            return;
        }
        std::memcpy(r->inline_data.data() + total, buffers[i].addr, buffers[i].length);
        total += buffers[i].length;
    }
    r->total = static_cast<std::uint32_t>(total);
}

int SrdQp::complete() {
    for (auto n = posted_.load(std::memory_order_relaxed); n < staged_ && error_ == 0; ++n) {
        if (!sq_[n % sq_.size()].addressed) error_ = EINVAL;
    }
    const int error = error_;
    // seq_cst: before the look at the engine's `sleeping`.
    if (error == 0) posted_.store(staged_, std::memory_order_seq_cst);
    current_ = nullptr;
    sq_lock_.unlock();
    if (error == 0) context_.wake();
    return error;
}

void SrdQp::abort() {
    current_ = nullptr;
    sq_lock_.unlock();
}

int SrdQp::post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad) {
    const std::lock_guard lock(rq_lock_);
    const int now = state_.load(std::memory_order_acquire);
    std::uint64_t posted = rq_posted_.load(std::memory_order_relaxed);
    int error = 0;
    for (; wr != nullptr; wr = wr->next) {
        if (posted - rq_taken_.load(std::memory_order_acquire) >= rq_.size()) error = ENOMEM;
        if (now == IBV_QPS_RESET || wr->num_sge < 1 ||
            static_cast<std::uint32_t>(wr->num_sge) > std::min(kSrdReceiveSge, cap_.max_recv_sge)) {
            error = EINVAL;
        }
        if (error != 0) break;
        SrdReceive& r = rq_[posted % rq_.size()];
        r.wr_id = wr->wr_id;
        r.pieces = static_cast<std::uint32_t>(wr->num_sge);
        std::copy_n(wr->sg_list, wr->num_sge, r.sge.begin());
        ++posted;
    }
    if (error != 0 && bad != nullptr) *bad = wr;
    rq_posted_.store(posted, std::memory_order_seq_cst);
    context_.wake();
    return error;
}

// ---- state: under the control lock

int SrdQp::modify(const ibv_qp_attr& attr, int mask) {
    auto& state = qp_base.state;
    if (!has(mask, IBV_QP_STATE)) return EINVAL;
    if (has(mask, IBV_QP_CUR_STATE) && attr.cur_qp_state != state) return EINVAL;
    switch (attr.qp_state) {
        case IBV_QPS_ERR:
            enter_error();
            return 0;
        case IBV_QPS_INIT:
            if (state != IBV_QPS_RESET || attr.port_num != 1 || attr.pkey_index != 0 ||
                !has(mask, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)) {
                return EINVAL;
            }
            queue_key = attr.qkey;
            break;
        case IBV_QPS_RTR:
            if (state != IBV_QPS_INIT) return EINVAL;
            break;
        case IBV_QPS_RTS:
            if (state != IBV_QPS_RTR || !has(mask, IBV_QP_SQ_PSN)) return EINVAL;
            if (has(mask, IBV_QP_RNR_RETRY)) rnr_retry = attr.rnr_retry & 7;
            break;
        default:
            return EINVAL;
    }
    state = attr.qp_state;
    state_.store(state, std::memory_order_release);
    return 0;
}

void SrdQp::query(ibv_qp_attr& attr, ibv_qp_init_attr& init) const {
    attr = {};
    attr.qp_state = attr.cur_qp_state = qp_base.state;
    attr.qkey = queue_key;
    attr.cap = cap_;
    attr.port_num = 1;
    attr.rnr_retry = rnr_retry;
    init = {};
    init.qp_context = qp_base.qp_context;
    init.send_cq = qp_base.send_cq;
    init.recv_cq = qp_base.recv_cq;
    init.cap = cap_;
    init.qp_type = qp_base.qp_type;
    init.sq_sig_all = signal_all_ ? 1 : 0;
}

void SrdQp::enter_error() {
    qp_base.state = IBV_QPS_ERR;
    state_.store(IBV_QPS_ERR, std::memory_order_release);
}

// ---- completions: engine

void SrdQp::push(Cq* queue, const Cq::Entry& entry) {
    const bool before = queue->overrun.load(std::memory_order_relaxed);
    if (queue->push(entry, entry.wc.status != IBV_WC_SUCCESS) || before) return;
    context_.raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
    enter_error();
}

void SrdQp::complete_send(std::uint64_t id, Opcode opcode, std::uint32_t bytes,
                          ibv_wc_status status, std::uint32_t vendor_err) {
    Cq::Entry entry{};
    entry.wc.wr_id = id;
    entry.wc.status = status;
    entry.wc.opcode = is_write(opcode) ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;
    entry.wc.vendor_err = vendor_err;
    entry.wc.byte_len = bytes;
    entry.wc.qp_num = qp_base.qp_num;
    entry.qp = this;
    entry.reclaim_to = 1;
    push(static_cast<Cq*>(qp_base.send_cq), entry);
}

SrdReceive SrdQp::take_receive() {
    const std::uint64_t number = rq_taken_.load(std::memory_order_relaxed);
    const SrdReceive taken = rq_[number % rq_.size()];
    rq_taken_.store(number + 1, std::memory_order_release);
    return taken;
}

void SrdQp::complete_receive(const SrdReceive& receive, ibv_wc_status status, const FlowPacket& p) {
    Cq::Entry entry{};
    entry.wc.wr_id = receive.wr_id;
    entry.wc.status = status;
    entry.wc.opcode = is_write(p.opcode) ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    entry.wc.byte_len = p.total;
    entry.wc.qp_num = qp_base.qp_num;
    entry.wc.src_qp = p.source;
    if (p.opcode == Opcode::write_imm || p.opcode == Opcode::send_imm) {
        entry.wc.imm_data = p.imm;
        entry.wc.wc_flags = IBV_WC_WITH_IMM;
    }
    entry.qp = this;
    push(static_cast<Cq*>(qp_base.recv_cq), entry);
}

bool SrdQp::flush() {
    bool worked = false;
    const std::uint64_t posted = posted_.load(std::memory_order_seq_cst);
    for (; sent_ < posted; ++sent_, worked = true) {
        const SrdRequest& r = sq_[sent_ % sq_.size()];
        complete_send(r.wr_id, r.opcode, r.total, IBV_WC_WR_FLUSH_ERR, 0);
    }
    cursor_ = 0;
    const FlowPacket none;
    for (; has_receive(); worked = true) {
        complete_receive(take_receive(), IBV_WC_WR_FLUSH_ERR, none);
    }
    return worked;
}

// ---- the fabric: objects

Fabric::Fabric(Context& context)
    : context_(context), random_(context.config.seed), next_qpn_(random_() % 0xffff + 1) {
    placements_.reserve(2 * kPlacements);
}

Fabric::~Fabric() {
    context_.port.header().gone.store(1, std::memory_order_seq_cst);
    for (auto& [cookie, out] : outgoing_) close(*out);
}

SrdQp* Fabric::create_qp(const ibv_qp_init_attr_ex& init) {
    if (qps_.size() >= kMaxQps) return errno = ENOMEM, nullptr;
    while (next_qpn_ == 0 || qps_.contains(next_qpn_)) next_qpn_ = (next_qpn_ + 1) & 0xffff;
    auto& slot = qps_[next_qpn_];
    slot = std::make_unique<SrdQp>(context_, init, next_qpn_);
    next_qpn_ = (next_qpn_ + 1) & 0xffff;
    return slot.get();
}

void Fabric::forget(const SrdQp* qp) {
    for (auto& [cookie, out] : outgoing_) {
        for (InFlight& message : out->window) {
            if (message.qp == qp) message.qp = nullptr;
        }
    }
}

void Fabric::destroy_qp(SrdQp* qp) {
    forget(qp);
    static_cast<Cq*>(qp->qp_base.send_cq)->forget(qp);
    static_cast<Cq*>(qp->qp_base.recv_cq)->forget(qp);
    qps_.erase(qp->qp_base.qp_num);
}

AddressHandle* Fabric::create_ah(ibv_pd* pd, const PortAddress& address) {
    auto& ah = handles_.emplace_back(std::make_unique<AddressHandle>());
    ah->context = pd->context;
    ah->pd = pd;
    ah->address = address;
    return ah.get();
}

void Fabric::destroy_ah(AddressHandle* ah) {
    std::erase_if(handles_, [ah](const auto& each) { return each.get() == ah; });
}

bool Fabric::step(std::uint64_t now, std::uint64_t& wake_at) {
    // A device that nobody uses for SRD spends one look on it.
    if (qps_.empty() && outgoing_.empty() &&
        context_.port.header().claimed.load(std::memory_order_seq_cst) == 0) {
        return false;
    }
    accept(now);
    bool worked = false;
    const bool mute = context_.mute(now);
    if (!mute) {
        for (auto& in : incoming_) {
            if (in) worked |= take(*in, now, wake_at);
        }
        worked |= place(now, wake_at);
        for (auto& in : incoming_) {
            if (in) worked |= retry_unready(*in, now, wake_at);
        }
        for (auto& [cookie, out] : outgoing_) worked |= take_answers(*out);
    }
    for (auto& [number, qp] : qps_) {
        if (qp->qp_base.state == IBV_QPS_RTS) {
            worked |= mute ? give_up_held(*qp, now, wake_at) : send(*qp, now);
        }
        if (qp->qp_base.state != IBV_QPS_ERR) continue;
        // In flight: flushed too, whatever the answer will be.
        for (auto& [cookie, out] : outgoing_) {
            for (InFlight& message : out->window) {
                if (message.qp != qp.get()) continue;
                answer(*out, message, IBV_WC_WR_FLUSH_ERR, 0);
                message.busy = true;  // its place is free once the answer is read
                ++out->waiting;
                worked = true;
            }
        }
        worked |= qp->flush();
    }
    for (auto& [cookie, out] : outgoing_) worked |= check_peer(*out, now, wake_at);
    return worked;
}

// ---- sending

Fabric::Outgoing& Fabric::outgoing(const PortAddress& address) {
    auto& slot = outgoing_[address.cookie];
    if (!slot) {
        slot = std::make_unique<Outgoing>();
        slot->address = address;
    }
    return *slot;
}

// Whether the peer's process runs and has its port open.
bool Fabric::present(Outgoing& out, std::uint64_t now) {
    return out.remote && out.remote->alive(now) &&
           out.remote->header().gone.load(std::memory_order_acquire) == 0;
}

// Whether there is a flow to the peer; tries to claim one at most once a millisecond.
bool Fabric::reach(Outgoing& out, std::uint64_t now) {
    if (out.index != kMaxFlows) return true;
    if (out.dropped || (out.tried_at != 0 && now - out.tried_at < 1'000'000)) return false;
    out.tried_at = now;
    try {
        if (!out.remote) out.remote = context_.connect(out.address);
    } catch (const std::system_error&) {
        return false;
    }
    if (!present(out, now)) return false;
    auto& flows = out.remote->header().flows;
    const std::uint64_t tag = (static_cast<std::uint64_t>(context_.port.address().pid) << 32) |
                              (((context_.port.address().cookie ^ now) << 2) & 0xffffffffu);
    for (std::uint32_t i = 0; i < kMaxFlows; ++i) {
        std::uint64_t nobody = 0;
        if (!flows[i].compare_exchange_strong(nobody, flow_word(tag, FlowState::claiming))) {
            continue;
        }
        Flow& flow = out.remote->flow(i);
        flow.sender.from = context_.port.address();
        flow.sender.head.store(0, std::memory_order_relaxed);
        flow.receiver.tail.store(0, std::memory_order_relaxed);
        flow.receiver.answered.store(0, std::memory_order_relaxed);
        out.index = i;
        out.word = flow_word(tag, FlowState::ready);
        out.head = out.published = out.answered = 0;
        flows[i].store(out.word, std::memory_order_seq_cst);
        out.remote->header().claimed.fetch_add(1, std::memory_order_seq_cst);
        return true;
    }
    return false;
}

void Fabric::close(Outgoing& out) {
    if (out.index != kMaxFlows) {
        std::uint64_t mine = out.word;
        out.remote->header().flows[out.index].compare_exchange_strong(
            mine, flow_word(out.word, FlowState::closed));
        ring_doorbell(out.remote->header());
    }
    out.index = kMaxFlows;
    out.remote.reset();
}

ibv_wc_status Fabric::sound(const SrdQp& qp, const SrdRequest& r) const {
    const std::uint32_t most = is_write(r.opcode) ? context_.config.max_message : kSrdMaxSend;
    if (r.total > most) return IBV_WC_LOC_LEN_ERR;
    for (std::uint32_t i = 0; i < r.pieces && !r.inlined; ++i) {
        if (r.sge[i].length == 0) continue;
        const Mr* mr = context_.regions.find(r.sge[i].lkey);
        if (mr == nullptr || mr->pd != qp.qp_base.pd ||
            !mr->contains(r.sge[i].addr, r.sge[i].length)) {
            return IBV_WC_LOC_PROT_ERR;
        }
    }
    return IBV_WC_SUCCESS;
}

bool Fabric::send(SrdQp& qp, std::uint64_t now) {
    const std::uint64_t posted = qp.posted_.load(std::memory_order_seq_cst);
    bool worked = false;
    while (qp.sent_ < posted && qp.qp_base.state == IBV_QPS_RTS) {
        const SrdRequest& r = qp.sq_[qp.sent_ % qp.sq_.size()];
        if (qp.cursor_ == 0) {
            const ibv_wc_status status = sound(qp, r);
            if (status != IBV_WC_SUCCESS) {
                ++qp.sent_;
                qp.complete_send(r.wr_id, r.opcode, r.total, status, kVendorLocal);
                worked = true;
                continue;
            }
        }
        Outgoing& out = outgoing(r.peer);
        InFlight& place = out.window[out.next % kFlowWindow];
        if (place.busy || !withstands_faults(qp, out, now)) break;
        // Out of reach: it waits in flight for the peer's time-out.
        if (out.dropped || out.lost_at != 0 || !reach(out, now)) {
            if (!out.dropped && out.lost_at == 0) out.lost_at = now;
        } else {
            const bool whole = transmit(qp, r, out, now);
            worked |= out.head != out.published;
            publish(out);
            if (!whole) break;
        }
        place = {true, &qp, r.wr_id, r.opcode, r.total};
        ++out.next;
        ++out.waiting;
        ++qp.sent_;
        qp.cursor_ = 0;
        qp.held_at_ = 0;
        context_.faults.count_message();
        worked = true;
    }
    return worked;
}

// What falls on the next message; whether it may go.
bool Fabric::withstands_faults(SrdQp& qp, Outgoing& out, std::uint64_t now) {
    Faults& faults = context_.faults;
    if (faults.none()) return true;
    faults.begin_counted(now);
    if (faults.strikes(FaultKind::drop, now)) {
        out.dropped = true;
        close(out);
    }
    if (faults.strikes(FaultKind::cq_overflow, now)) {
        auto* queue = static_cast<Cq*>(qp.qp_base.send_cq);
        queue->overrun.store(true, std::memory_order_relaxed);
        context_.raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
        qp.enter_error();
    }
    if (faults.strikes(FaultKind::qp_error, now)) qp.enter_error();
    return qp.qp_base.state == IBV_QPS_RTS && !context_.mute(now);
}

// While the link is cut: requests that it holds time out like those in flight.
bool Fabric::give_up_held(SrdQp& qp, std::uint64_t now, std::uint64_t& wake_at) {
    const std::uint64_t posted = qp.posted_.load(std::memory_order_seq_cst);
    if (qp.sent_ == posted) return false;
    if (qp.held_at_ == 0) qp.held_at_ = now;
    const std::uint64_t due = qp.held_at_ + context_.config.srd_timeout_ms * 1'000'000;
    if (now < due) {
        wake_at = std::min(wake_at, due);
        return false;
    }
    if (qp.cursor_ != 0) {  // the rest of it does not come
        Outgoing& out = outgoing(qp.sq_[qp.sent_ % qp.sq_.size()].peer);
        out.lost_at = out.quiet_at != 0 ? out.quiet_at : now;
        close(out);
    }
    qp.held_at_ = 0;
    qp.cursor_ = 0;
    for (; qp.sent_ < posted; ++qp.sent_) {
        const SrdRequest& r = qp.sq_[qp.sent_ % qp.sq_.size()];
        qp.complete_send(r.wr_id, r.opcode, r.total, IBV_WC_RESP_TIMEOUT_ERR, kVendorTimeout);
    }
    return true;
}

void Fabric::publish(Outgoing& out) {
    if (out.head == out.published) return;
    out.published = out.head;
    out.remote->flow(out.index).sender.head.store(out.head, std::memory_order_seq_cst);
    ring_doorbell(out.remote->header());
}

// Contiguous room in the flow, or null while it is full.
std::byte* Fabric::reserve(Outgoing& out, std::uint32_t bytes) {
    Flow& flow = out.remote->flow(out.index);
    const std::uint64_t free =
        kRingBytes - (out.head - flow.receiver.tail.load(std::memory_order_acquire));
    const auto at = static_cast<std::uint32_t>(out.head % kRingBytes);
    const std::uint32_t to_end = kRingBytes - at;
    if (bytes <= to_end) return bytes <= free ? flow.data + at : nullptr;
    if (to_end + bytes > free) return nullptr;
    // Only the fields that say so: less than a header may be left.
    FlowPacket pad;
    pad.bytes = to_end;
    std::memcpy(flow.data + at, &pad, std::min<std::size_t>(sizeof(pad), to_end));
    out.head += to_end;
    return flow.data;
}

// Whether all of it is in the flow; if not, `cursor_` says how much.
bool Fabric::transmit(SrdQp& qp, const SrdRequest& r, Outgoing& out, std::uint64_t now) {
    do {
        const std::uint32_t left = r.total - qp.cursor_;
        const ibv_sge& sge = r.sge[0];
        const Mr* mr =
            is_write(r.opcode) && r.total != 0 ? context_.regions.find(sge.lkey) : nullptr;
        const bool reference =
            mr != nullptr && context_.config.by_reference && left >= kReferenceFrom && mr->backing;
        FlowPacket p;
        p.length = std::min(left, reference ? kFlowReference : kFlowPayload);
        p.bytes = static_cast<std::uint32_t>(sizeof(p)) + (reference ? 0 : align_up(p.length));
        p.bytes = (p.bytes + 127) / 128 * 128;
        std::byte* at = reserve(out, p.bytes);
        if (at == nullptr) return false;
        p.message = out.next;
        p.arrival = context_.link.depart(now, p.length);
        p.remote_addr = r.remote_addr + qp.cursor_;
        p.total = r.total;
        p.offset = qp.cursor_;
        p.rkey = r.rkey;
        p.imm = r.imm;
        p.source = qp.qp_base.qp_num;
        p.destination = r.qpn;
        p.queue_key = r.queue_key;
        p.opcode = r.opcode;
        p.rnr_retry = qp.rnr_retry;
        std::byte* to = at + sizeof(p);
        if (reference) {
            p.flags |= kReference;
            p.ref_fd = mr->backing->fd.get();
            p.ref_inode = mr->backing->inode;
            p.ref_offset = mr->backing->offset + sge.addr + qp.cursor_ -
                           reinterpret_cast<std::uint64_t>(mr->addr);
        } else if (r.inlined) {
            std::memcpy(to, r.inline_data.data(), p.length);
        } else if (is_write(r.opcode)) {
            if (p.length != 0) {
                std::memcpy(to, reinterpret_cast<const std::byte*>(sge.addr) + qp.cursor_,
                            p.length);
            }
        } else {
            for (std::uint32_t i = 0; i < r.pieces; ++i) {
                std::memcpy(to, reinterpret_cast<const void*>(r.sge[i].addr), r.sge[i].length);
                to += r.sge[i].length;
            }
        }
        std::memcpy(at, &p, sizeof(p));
        out.head += p.bytes;
        qp.cursor_ += p.length;
    } while (qp.cursor_ < r.total);
    return true;
}

void Fabric::answer(Outgoing& out, InFlight& message, ibv_wc_status status,
                    std::uint32_t vendor_err) {
    --out.waiting;
    SrdQp* qp = message.qp;
    message.busy = false;
    message.qp = nullptr;
    if (qp == nullptr) return;
    qp->complete_send(message.wr_id, message.opcode, message.total, status, vendor_err);
}

bool Fabric::take_answers(Outgoing& out) {
    if (out.index == kMaxFlows) return false;
    Flow& flow = out.remote->flow(out.index);
    const std::uint64_t end = flow.receiver.answered.load(std::memory_order_acquire);
    if (out.answered == end) return false;
    for (; out.answered != end; ++out.answered) {
        const std::uint64_t entry =
            flow.acks[out.answered % kFlowWindow].load(std::memory_order_relaxed);
        InFlight& message = out.window[(entry >> 8) % kFlowWindow];
        if (!message.busy) continue;
        const auto status = static_cast<ibv_wc_status>(entry & 0xff);
        answer(out, message, status, status == IBV_WC_SUCCESS ? 0 : kVendorRefused);
    }
    return true;
}

// A live peer whose engine is late has lost nothing; only one that is gone runs into the time-out.
bool Fabric::check_peer(Outgoing& out, std::uint64_t now, std::uint64_t& wake_at) {
    if (out.waiting == 0) {
        out.lost_at = out.quiet_at = 0;
        return false;
    }
    const bool lost = out.dropped || out.lost_at != 0 || !present(out, now);
    if (lost && out.lost_at == 0) out.lost_at = out.quiet_at != 0 ? out.quiet_at : now;
    const bool quiet = lost || context_.mute(now) ||
                       out.remote->header().silent.load(std::memory_order_acquire) != 0;
    if (!quiet) {
        out.quiet_at = 0;
        wake_at = std::min(wake_at, now + kWatchNs);
        return false;
    }
    if (out.quiet_at == 0) out.quiet_at = now;
    const std::uint64_t due =
        (lost ? out.lost_at : out.quiet_at) + context_.config.srd_timeout_ms * 1'000'000;
    if (now < due) {
        wake_at = std::min(wake_at, lost ? due : std::min(due, now + kWatchNs));
        return false;
    }
    close(out);
    for (InFlight& message : out.window) {
        if (message.busy) answer(out, message, IBV_WC_RESP_TIMEOUT_ERR, kVendorTimeout);
    }
    // A request half in the flow begins anew elsewhere.
    for (auto& [number, qp] : qps_) {
        if (qp->cursor_ != 0 &&
            qp->sq_[qp->sent_ % qp->sq_.size()].peer.cookie == out.address.cookie) {
            qp->cursor_ = 0;
        }
    }
    out.lost_at = out.quiet_at = 0;
    return true;
}

// ---- receiving

// Looks for new senders, and once in a while for dead ones.
void Fabric::accept(std::uint64_t now) {
    auto& words = context_.port.header().flows;
    const bool look = now - looked_at_ > 10'000'000;
    if (look) looked_at_ = now;
    for (std::uint32_t i = 0; i < kMaxFlows; ++i) {
        const std::uint64_t word = words[i].load(std::memory_order_seq_cst);
        if (word == 0) continue;
        const FlowState state = flow_state(word);
        auto& in = incoming_[i];
        const bool gone = state == FlowState::closed ||
                          (look && !(in ? in->sender->alive(now) : runs(flow_pid(word))));
        if (gone) {
            if (in) drop(*in);
            in.reset();
            words[i].store(0, std::memory_order_seq_cst);
        } else if (state == FlowState::ready && !in) {
            auto fresh = std::make_unique<Incoming>();
            fresh->index = i;
            fresh->word = word;
            fresh->from = context_.port.flow(i).sender.from;
            try {
                fresh->sender = context_.connect(fresh->from);
            } catch (const std::system_error&) {
                continue;  // on its way out
            }
            in = std::move(fresh);
        }
    }
}

void Fabric::drop(Incoming& in) {
    std::erase_if(placements_, [&in](const Placement& each) { return each.flow == &in; });
}

// What is wrong with a message, as far as its first packet tells.
ibv_wc_status Fabric::judge(const Incoming& in, const FlowPacket& p) const {
    const bool known = std::any_of(handles_.begin(), handles_.end(), [&in](const auto& ah) {
        return ah->address.cookie == in.from.cookie;
    });
    if (!known) return IBV_WC_REM_OP_ERR;
    // A wrong queue key is answered as a wrong number.
    const auto found = qps_.find(p.destination);
    if (found == qps_.end() || !found->second->receives() ||
        found->second->queue_key != p.queue_key) {
        return IBV_WC_REM_INV_RD_REQ_ERR;
    }
    if (!is_write(p.opcode) || p.total == 0) return IBV_WC_SUCCESS;
    const Mr* mr = context_.regions.find(p.rkey);
    const bool allowed = mr != nullptr && mr->pd == found->second->qp_base.pd &&
                         (mr->access & IBV_ACCESS_REMOTE_WRITE) != 0 &&
                         mr->contains(p.remote_addr, p.total);
    return allowed ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
}

// Packets from the flow into the set that waits to be placed.
bool Fabric::take(Incoming& in, std::uint64_t now, std::uint64_t& wake_at) {
    Flow& flow = context_.port.flow(in.index);
    const std::uint64_t head = flow.sender.head.load(std::memory_order_seq_cst);
    const auto& config = context_.config;
    const std::uint64_t hold = config.hold_ns;
    const std::uint64_t before = in.tail;
    while (in.tail != head && placements_.size() < kPlacements) {
        const std::byte* at = flow.data + in.tail % kRingBytes;
        FlowPacket p;
        std::memcpy(&p, at, sizeof(p));
        const std::uint32_t payload = (p.flags & kReference) != 0 ? 0 : p.length;
        if (p.bytes < sizeof(p) || p.bytes % sizeof(p) != 0 ||
            p.bytes > kRingBytes - in.tail % kRingBytes || p.bytes - sizeof(p) < payload) {
            in.tail = head;  // not a packet: nothing after it can be read either
            break;
        }
        if (p.opcode == Opcode::pad) {
            in.tail += p.bytes;
            continue;
        }
        if (!context_.link.arrived(p.arrival, now, wake_at)) break;
        context_.link.take(p.arrival, p.length);
        in.tail += p.bytes;
        Arriving& message = in.messages[p.message];
        if (p.offset == 0) {
            message.first = p;
            message.status = judge(in, p);
        }
        message.taken += p.length;
        Placement placement{&in, p, {at + sizeof(p), at + sizeof(p) + payload}, now};
        if (config.reorder && random_() % 4 == 0) placement.not_before += random_() % hold;
        ++message.outstanding;
        if (is_write(p.opcode) && random_() % 100 < config.duplicates) {
            ++message.outstanding;
            Placement again = placement;
            if (config.reorder) again.not_before += random_() % hold;
            if (config.reorder && random_() % 8 == 0)
                again.not_before += random_() % (kLate * hold);
            placements_.push_back(std::move(again));
        }
        placements_.push_back(std::move(placement));
    }
    if (in.tail == before) return false;
    flow.receiver.tail.store(in.tail, std::memory_order_release);
    ring_doorbell(in.sender->header());
    return true;
}

// Places packets whose time has come, any of them first.
bool Fabric::place(std::uint64_t now, std::uint64_t& wake_at) {
    std::uint64_t moved = 0;
    bool worked = false;
    for (int n = 0; n < kTurnPackets && moved < kTurnBytes && !placements_.empty(); ++n) {
        const std::size_t size = placements_.size();
        const std::size_t from = context_.config.reorder ? random_() % size : 0;
        std::size_t chosen = size;
        for (std::size_t i = 0; i < size && chosen == size; ++i) {
            const std::size_t each = (from + i) % size;
            const std::uint64_t due = placements_[each].not_before;
            if (due <= now) chosen = each;
            if (due > now) wake_at = std::min(wake_at, due);
        }
        if (chosen == size) break;
        Placement placement = std::move(placements_[chosen]);
        if (context_.config.reorder) {
            if (chosen != size - 1) placements_[chosen] = std::move(placements_.back());
            placements_.pop_back();
        } else {
            placements_.erase(placements_.begin() + static_cast<std::ptrdiff_t>(chosen));
        }
        moved += placement.packet.length;
        execute(placement);
        worked = true;
    }
    return worked;
}

void Fabric::execute(Placement& placement) {
    Incoming& in = *placement.flow;
    const FlowPacket& p = placement.packet;
    Arriving& message = in.messages.at(p.message);
    if (message.status == IBV_WC_SUCCESS) {
        const std::byte* source = placement.payload.data();
        if ((p.flags & kReference) != 0) {
            source = in.sender->reference(p.ref_fd, p.ref_inode, p.ref_offset, p.length);
        }
        const Mr* mr = is_write(p.opcode) ? context_.regions.find(p.rkey) : nullptr;
        if (!is_write(p.opcode)) {
            message.payload = std::move(placement.payload);
        } else if (p.length == 0) {
            // Nothing to place.
        } else if (source == nullptr) {
            message.status = IBV_WC_REM_ABORT_ERR;  // the sender took its memory back
        } else if (mr == nullptr || !mr->contains(p.remote_addr, p.length)) {
            message.status = IBV_WC_REM_ACCESS_ERR;  // deregistered since
        } else {
            place_bytes(context_.config, p.remote_addr, source, p.length);
        }
    }
    if (--message.outstanding == 0 && message.taken == message.first.total) {
        finish(in, p.message, message);
    }
}

// Every byte is placed: the receive and the answer.
void Fabric::finish(Incoming& in, std::uint64_t number, Arriving& message) {
    const FlowPacket& p = message.first;
    if (message.status == IBV_WC_SUCCESS && takes_receive(p.opcode)) {
        const auto found = qps_.find(p.destination);
        if (found == qps_.end() || !found->second->receives()) {
            message.status = IBV_WC_REM_INV_RD_REQ_ERR;
        } else if (!found->second->has_receive()) {
            in.unready.push_back(number);
            return;
        } else {
            SrdQp& qp = *found->second;
            const SrdReceive receive = qp.take_receive();
            const ibv_wc_status here =
                is_write(p.opcode) ? IBV_WC_SUCCESS : scatter(qp, receive, message.payload);
            if (here != IBV_WC_SUCCESS) message.status = IBV_WC_REM_INV_REQ_ERR;
            qp.complete_receive(receive, here, p);
        }
    }
    reply(in, number, message.status);
    in.messages.erase(number);
}

// Messages for which there was no receive, in the order in which they became whole.
bool Fabric::retry_unready(Incoming& in, std::uint64_t now, std::uint64_t& wake_at) {
    if (in.unready.empty()) return false;
    bool worked = false;
    std::vector<std::uint64_t> waiting;
    waiting.swap(in.unready);
    for (const std::uint64_t number : waiting) {
        Arriving& message = in.messages.at(number);
        if (message.rnr_since == 0) message.rnr_since = now;
        const std::uint64_t budget = (message.first.rnr_retry + 1u) * kRnrNs;
        if (message.first.rnr_retry != 7 && now - message.rnr_since >= budget) {
            message.status = IBV_WC_RNR_RETRY_EXC_ERR;
        }
        finish(in, number, message);
    }
    worked = in.unready.size() != waiting.size();
    if (!in.unready.empty()) wake_at = std::min(wake_at, now + kRnrNs);
    return worked;
}

ibv_wc_status Fabric::scatter(const SrdQp& qp, const SrdReceive& receive,
                              const std::vector<std::byte>& payload) const {
    std::size_t placed = 0;
    for (std::uint32_t i = 0; i < receive.pieces && placed < payload.size(); ++i) {
        const ibv_sge& sge = receive.sge[i];
        const std::size_t here = std::min<std::size_t>(sge.length, payload.size() - placed);
        if (here == 0) continue;
        const Mr* mr = context_.regions.find(sge.lkey);
        if (mr == nullptr || mr->pd != qp.qp_base.pd ||
            (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0 || !mr->contains(sge.addr, sge.length)) {
            return IBV_WC_LOC_PROT_ERR;
        }
        place_bytes(context_.config, sge.addr, payload.data() + placed, here);
        placed += here;
    }
    return placed == payload.size() ? IBV_WC_SUCCESS : IBV_WC_LOC_LEN_ERR;
}

void Fabric::reply(Incoming& in, std::uint64_t message, ibv_wc_status status) {
    Flow& flow = context_.port.flow(in.index);
    flow.acks[in.answered % kFlowWindow].store((message << 8) | static_cast<std::uint64_t>(status),
                                               std::memory_order_relaxed);
    flow.receiver.answered.store(++in.answered, std::memory_order_seq_cst);
    ring_doorbell(in.sender->header());
}

}  // namespace mkernel::nics::softverbs
