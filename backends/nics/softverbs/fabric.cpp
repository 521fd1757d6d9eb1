#include "backends/nics/softverbs/fabric.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"

namespace mkernel::nics::softverbs {

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
    abandon(*qp);
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
    try {
        ah->remote = context_.connect(address);
    } catch (const std::system_error&) {  // gone, which the first message to it will find
    }
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
        worked |= settle();
        worked |= place(now, wake_at);
        for (auto& in : incoming_) {
            if (!in) continue;
            worked |= retry_unready(*in, now, wake_at);
            show_answers(*in);
        }
        for (auto& [cookie, out] : outgoing_) worked |= take_answers(*out);
    }
    for (auto& [number, qp] : qps_) {
        if (qp->qp_base.state == IBV_QPS_RTS) {
            worked |= mute ? give_up_held(*qp, now, wake_at) : send(*qp, now);
        }
        if (qp->qp_base.state != IBV_QPS_ERR) continue;
        abandon(*qp);
        // Requests in flight are flushed too, whatever their answer will be.
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
    for (auto& [cookie, out] : outgoing_) {
        if (!mute) {
            worked |= tell_abandoned(*out);
            publish(*out);
        }
        worked |= check_peer(*out, now, wake_at);
    }
    return worked;
}

}  // namespace mkernel::nics::softverbs
