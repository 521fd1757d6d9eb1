// The fabric's sending half: requests into flows, answers into completions, peers that fall silent.
#include <algorithm>
#include <cstring>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/fabric.hpp"

namespace mkernel::nics::softverbs {
namespace {

constexpr std::uint64_t kWatchNs = 2'000'000;

// Vendor codes of this device, which distinguish causes that the status alone does not.
constexpr std::uint32_t kVendorTimeout = 0x91;
constexpr std::uint32_t kVendorRefused = 0x92;
constexpr std::uint32_t kVendorLocal = 0x93;

}  // namespace

Fabric::Outgoing& Fabric::outgoing(const PortAddress& address) {
    auto& slot = outgoing_[address.cookie];
    if (!slot) {
        slot = std::make_unique<Outgoing>();
        slot->address = address;
    }
    return *slot;
}

// Returns true while the peer's process runs and has its port open.
bool Fabric::present(Outgoing& out, std::uint64_t now) {
    return out.remote && out.remote->alive(now) &&
           out.remote->header().gone.load(std::memory_order_acquire) == 0;
}

// Returns true where there is a flow to the peer; tries to claim one at most once a millisecond.
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
        publish(out);
        std::uint64_t mine = out.word;
        out.remote->header().flows[out.index].compare_exchange_strong(
            mine, flow_word(out.word, FlowState::closed));
        ring_doorbell(out.remote->header());
    }
    out.index = kMaxFlows;
    out.abandoned.clear();
    out.remote.reset();
}

ibv_wc_status Fabric::sound(const SrdQp& qp, const SrdRequest& r) const {
    const ibv_sge& source = r.source;
    if (source.length > context_.config.max_message) return IBV_WC_LOC_LEN_ERR;
    if (source.length == 0) return IBV_WC_SUCCESS;
    const Mr* mr = context_.regions.find(source.lkey);
    if (mr == nullptr || mr->pd != qp.qp_base.pd || !mr->contains(source.addr, source.length)) {
        return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

bool Fabric::send(SrdQp& qp, std::uint64_t now) {
    const std::uint64_t posted = qp.posted_.load(std::memory_order_seq_cst);
    bool worked = false;
    while (qp.sent_ < posted && qp.qp_base.state == IBV_QPS_RTS) {
        const SrdRequest& r = qp.sq_[qp.sent_ % qp.sq_.size()];
        if (!qp.begun_) {
            const ibv_wc_status status = sound(qp, r);
            if (status != IBV_WC_SUCCESS) {
                ++qp.sent_;
                qp.complete_send(r.wr_id, r.source.length, status, kVendorLocal);
                worked = true;
                continue;
            }
        }
        Outgoing& out = outgoing(r.peer);
        if (!qp.begun_ && !begin(qp, r, out, now)) break;
        // Out of reach: it waits in flight for the peer's time-out.
        if (out.index != kMaxFlows && out.lost_at == 0) {
            const bool whole = transmit(qp, r, out, now);
            worked |= out.head != out.published;
            if (!whole) break;
        } else if (qp.cursor_ != 0) {
            break;
        }
        worked = true;
        qp.end_message();
        context_.faults.count_message();
    }
    return worked;
}

// Gives the next message its number and its place in flight, where there is one. Packets of several
// queue pairs' messages may follow each other in the flow.
bool Fabric::begin(SrdQp& qp, const SrdRequest& r, Outgoing& out, std::uint64_t now) {
    InFlight& place = out.window[out.next % kFlowWindow];
    if (place.busy || !withstands_faults(qp, out, now)) return false;
    if (!out.dropped && (out.lost_at != 0 || !reach(out, now))) {
        if (out.lost_at == 0) out.lost_at = now;
    }
    place = {true, &qp, r.wr_id, r.source.length};
    qp.message_ = out.next++;
    qp.begun_ = true;
    qp.held_at_ = 0;
    ++out.waiting;
    return true;
}

// Abandons the rest of a message that was begun. Its place is free once the peer has answered.
void Fabric::abandon(SrdQp& qp) {
    if (!qp.begun_) return;
    Outgoing& out = outgoing(qp.sq_[qp.sent_ % qp.sq_.size()].peer);
    if (out.index != kMaxFlows) out.abandoned.push_back(qp.message_);
    qp.end_message();
}

bool Fabric::tell_abandoned(Outgoing& out) {
    bool told = false;
    while (!out.abandoned.empty() && out.index != kMaxFlows) {
        FlowPacket p;
        p.bytes = sizeof(p);
        std::byte* at = reserve(out, p.bytes);
        if (at == nullptr) break;
        p.message = out.abandoned.back();
        p.opcode = Opcode::write;
        p.flags = kAbandoned;
        std::memcpy(at, &p, sizeof(p));
        out.head += p.bytes;
        out.abandoned.pop_back();
        told = true;
    }
    return told;
}

// Applies the faults that fall on the next message; returns whether it may go.
bool Fabric::withstands_faults(SrdQp& qp, Outgoing& out, std::uint64_t now) {
    const auto struck = context_.strike(*static_cast<Cq*>(qp.qp_base.send_cq), now);
    if (struck.drop) {
        out.dropped = true;
        close(out);
    }
    if (struck.overflow || struck.qp_error) qp.enter_error();
    return qp.qp_base.state == IBV_QPS_RTS && !context_.mute(now);
}

// Gives up requests that a cut of the link holds: they time out like those in flight.
bool Fabric::give_up_held(SrdQp& qp, std::uint64_t now, std::uint64_t& wake_at) {
    const std::uint64_t posted = qp.posted_.load(std::memory_order_seq_cst);
    if (qp.sent_ == posted) return false;
    if (qp.held_at_ == 0) qp.held_at_ = now;
    const std::uint64_t due = qp.held_at_ + context_.config.srd_timeout_ms * 1'000'000;
    if (now < due) {
        wake_at = std::min(wake_at, due);
        return false;
    }
    if (qp.begun_) {  // in flight: it times out with the rest of what its peer was sent
        Outgoing& out = outgoing(qp.sq_[qp.sent_ % qp.sq_.size()].peer);
        out.lost_at = out.quiet_at != 0 ? out.quiet_at : now;
        close(out);
        qp.end_message();
    }
    qp.held_at_ = 0;
    for (; qp.sent_ < posted; ++qp.sent_) {
        const SrdRequest& r = qp.sq_[qp.sent_ % qp.sq_.size()];
        qp.complete_send(r.wr_id, r.source.length, IBV_WC_RESP_TIMEOUT_ERR, kVendorTimeout);
    }
    return true;
}

// Publishes the packets, once for all of a step: words that two engines share are expensive.
void Fabric::publish(Outgoing& out) {
    if (out.head == out.published) return;
    out.published = out.head;
    out.remote->flow(out.index).sender.head.store(out.head, std::memory_order_seq_cst);
    ring_doorbell(out.remote->header());
}

std::byte* Fabric::reserve(Outgoing& out, std::uint32_t bytes) {
    Flow& flow = out.remote->flow(out.index);
    return softverbs::reserve<FlowPacket>(
        flow.data, out.head, flow.receiver.tail.load(std::memory_order_acquire), bytes);
}

// Transmits a message; returns whether all of it is in the flow. If not, `cursor_` holds how much is.
bool Fabric::transmit(SrdQp& qp, const SrdRequest& r, Outgoing& out, std::uint64_t now) {
    const ibv_sge& sge = r.source;
    do {
        const std::uint32_t left = sge.length - qp.cursor_;
        const Mr* mr = sge.length != 0 ? context_.regions.find(sge.lkey) : nullptr;
        const bool device = mr != nullptr && mr->device;
        const bool reference = device || (mr != nullptr && context_.config.by_reference &&
                                          left >= kReferenceFrom && mr->backing);
        if (device && !context_.told(*out.remote)) return false;
        FlowPacket p;
        const std::uint32_t most = device ? kDeviceReference : kFlowReference;
        p.length = std::min(left, reference ? most : kFlowPayload);
        p.bytes = static_cast<std::uint32_t>(sizeof(p)) + (reference ? 0 : align_packet(p.length));
        p.bytes = (p.bytes + 127) / 128 * 128;
        std::byte* at = reserve(out, p.bytes);
        if (at == nullptr) return false;
        p.message = qp.message_;
        p.arrival = context_.link.depart(now, p.length);
        p.remote_addr = r.remote_addr + qp.cursor_;
        p.total = sge.length;
        p.offset = qp.cursor_;
        p.rkey = r.rkey;
        p.imm = r.imm;
        p.source = qp.qp_base.qp_num;
        p.destination = r.qpn;
        p.queue_key = r.queue_key;
        p.opcode = r.opcode;
        p.rnr_retry = qp.rnr_retry;
        if (device) {
            p.flags |= kReference | kDevice;
            p.ref_inode = mr->device->token;
            p.ref_offset = sge.addr + qp.cursor_ - reinterpret_cast<std::uint64_t>(mr->addr);
        } else if (reference) {
            p.flags |= kReference;
            p.ref_fd = mr->backing->fd.get();
            p.ref_inode = mr->backing->inode;
            p.ref_offset = mr->backing->offset + sge.addr + qp.cursor_ -
                           reinterpret_cast<std::uint64_t>(mr->addr);
        } else if (p.length != 0) {
            std::memcpy(at + sizeof(p), reinterpret_cast<const std::byte*>(sge.addr) + qp.cursor_,
                        p.length);
        }
        std::memcpy(at, &p, sizeof(p));
        out.head += p.bytes;
        qp.cursor_ += p.length;
    } while (qp.cursor_ < sge.length);
    return true;
}

void Fabric::answer(Outgoing& out, InFlight& message, ibv_wc_status status,
                    std::uint32_t vendor_err) {
    --out.waiting;
    SrdQp* qp = message.qp;
    message.busy = false;
    message.qp = nullptr;
    if (qp == nullptr) return;
    qp->complete_send(message.wr_id, message.total, status, vendor_err);
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
    for (auto& [number, qp] : qps_) {  // what was begun is among them
        if (qp->begun_ && qp->sq_[qp->sent_ % qp->sq_.size()].peer.cookie == out.address.cookie) {
            qp->end_message();
        }
    }
    out.lost_at = out.quiet_at = 0;
    return true;
}

}  // namespace mkernel::nics::softverbs
