#include "backends/nics/softverbs/srd_qp.hpp"

#include <algorithm>
#include <cerrno>

#include "backends/nics/softverbs/context.hpp"

namespace mkernel::nics::softverbs {
namespace {

bool has(int mask, int wanted) {
    return (mask & wanted) == wanted;
}

// ---- the table of an extended queue pair

void wr_start(ibv_qp_ex* qp) {
    SrdQp::of(qp).start();
}
int wr_complete(ibv_qp_ex* qp) {
    return SrdQp::of(qp).complete();
}
void wr_rdma_write(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t remote) {
    SrdQp::of(qp).begin(Opcode::write, rkey, remote, 0);
}
void wr_rdma_write_imm(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t remote, __be32 imm) {
    SrdQp::of(qp).begin(Opcode::write_imm, rkey, remote, imm);
}
void wr_set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t qpn, std::uint32_t queue_key) {
    SrdQp::of(qp).set_address(ah, qpn, queue_key);
}
void wr_set_sge(ibv_qp_ex* qp, std::uint32_t lkey, std::uint64_t address, std::uint32_t length) {
    SrdQp::of(qp).set_sge({address, length, lkey});
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
    ibv_qp_ex::wr_start = softverbs::wr_start;
    ibv_qp_ex::wr_complete = softverbs::wr_complete;
    ibv_qp_ex::wr_set_ud_addr = softverbs::wr_set_ud_addr;
    ibv_qp_ex::wr_set_sge = softverbs::wr_set_sge;
    // As in a driver, functions that were not requested at creation are not there; nor are, in this one, those
    // that no backend calls: lists of pieces, inline data and abort.
    const auto ops = init.send_ops_flags;
    if ((ops & IBV_QP_EX_WITH_RDMA_WRITE) != 0) ibv_qp_ex::wr_rdma_write = softverbs::wr_rdma_write;
    if ((ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) != 0) {
        ibv_qp_ex::wr_rdma_write_imm = softverbs::wr_rdma_write_imm;
    }
    ++static_cast<Cq*>(qp_base.send_cq)->users;
    ++static_cast<Cq*>(qp_base.recv_cq)->users;
}

SrdQp::~SrdQp() {
    --static_cast<Cq*>(qp_base.send_cq)->users;
    --static_cast<Cq*>(qp_base.recv_cq)->users;
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
               (wr_flags & ~unsigned{IBV_SEND_SIGNALED}) != 0) {
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

void SrdQp::set_sge(const ibv_sge& piece) {
    if (error_ == 0 && current_ == nullptr) error_ = EINVAL;
    if (error_ == 0) current_->source = piece;
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

int SrdQp::post_recv(ibv_recv_wr* wr, ibv_recv_wr** bad) {
    const int error = rq_.post(wr, bad, state_, 1, cap_.max_recv_sge);
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
            if (has(mask, IBV_QP_RNR_RETRY) && !context_.config.rnr_retry) return EOPNOTSUPP;
            if (has(mask, IBV_QP_RNR_RETRY)) rnr_retry = attr.rnr_retry & 7;
            break;
        default:
            return EINVAL;
    }
    state = attr.qp_state;
    state_.store(state, std::memory_order_release);
    return 0;
}

void SrdQp::enter_error() {
    qp_base.state = IBV_QPS_ERR;
    state_.store(IBV_QPS_ERR, std::memory_order_release);
}

// ---- completions: engine

void SrdQp::complete_send(std::uint64_t id, std::uint32_t bytes, ibv_wc_status status,
                          std::uint32_t vendor_err) {
    Cq::Entry entry =
        Cq::ended(this, IBV_WC_RDMA_WRITE, qp_base.qp_num, id, bytes, status, vendor_err);
    entry.reclaim_to = 1;
    if (!context_.complete(qp_base.send_cq, entry)) enter_error();
}

void SrdQp::complete_receive(std::uint64_t id, ibv_wc_status status, const FlowMessage& m) {
    const Cq::Entry entry = Cq::received(this, qp_base.qp_num, m.source, id, status, m);
    if (!context_.complete(qp_base.recv_cq, entry)) enter_error();
}

bool SrdQp::flush() {
    bool worked = false;
    const std::uint64_t posted = posted_.load(std::memory_order_seq_cst);
    for (; sent_ < posted; ++sent_, worked = true) {
        const SrdRequest& r = sq_[sent_ % sq_.size()];
        complete_send(r.wr_id, r.source.length, IBV_WC_WR_FLUSH_ERR, 0);
    }
    for (; !rq_.empty(); worked = true) complete_receive(rq_.take(), IBV_WC_WR_FLUSH_ERR, {});
    return worked;
}

}  // namespace mkernel::nics::softverbs
