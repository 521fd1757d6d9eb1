// The receiving half of an RC queue pair: it checks, places and acknowledges what peers sent.
#include <algorithm>
#include <array>
#include <cstring>

#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/queue_pair.hpp"

namespace mkernel::nics::softverbs {
namespace {

// Receiver-not-ready timer codes of the InfiniBand specification, in units of 10 us.
constexpr std::array<std::uint32_t, 32> kRnrTimer = {
    65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
    48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
    2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

constexpr std::uint64_t kTurnBytes = 1024 * 1024;  // executed before the other QPs get their turn
constexpr int kTurnPackets = 64;
constexpr std::size_t kMaxHeld = 96;  // writes with relaxed ordering that wait to land

}  // namespace

bool Qp::receive(std::uint64_t now, std::uint64_t& wake_at) {
    Ring& ring = inbound();
    const std::uint64_t head = ring.producer.head.load(std::memory_order_seq_cst);
    if (tail_ == head || deaf_) return land(now, wake_at);
    const std::uint64_t before = tail_;
    std::uint64_t moved = 0;
    for (int n = 0; tail_ != head && n < kTurnPackets && moved < kTurnBytes; ++n) {
        if (ring.producer.closed.load(std::memory_order_acquire) != 0) break;
        const std::byte* at = ring.data + tail_ % kRingBytes;
        Packet p;
        std::memcpy(&p, at, sizeof(p));
        if (!readable(p, tail_)) {
            if (!moving_.empty()) break;
            refuse(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
            break;
        }
        if (p.opcode != Opcode::pad) {
            if (!context_.link.arrived(p.arrival, now, wake_at)) break;
            if (!execute(p, at + sizeof(Packet), now, wake_at)) break;
            context_.link.take(p.arrival, p.length);
            if (moving_.empty()) moved += p.length;
        }
        tail_ += p.bytes;
    }
    copy_ahead(head, now);
    const bool landed = land(now, wake_at);
    if (tail_ == before) return landed || state == IBV_QPS_ERR;
    publish_executed();
    return true;
}

void Qp::copy_ahead(std::uint64_t head, std::uint64_t now) {
    const Ring& ring = inbound();
    for (std::uint64_t at = early_.look_on(tail_); at != head; at = early_.look_on(at)) {
        Packet p;
        std::memcpy(&p, ring.data + at % kRingBytes, sizeof(p));
        if (!readable(p, at) || ring.producer.closed.load(std::memory_order_acquire) != 0) {
            return;
        }
        if ((p.flags & kDevice) != 0) {
            if (p.arrival <= now || !may_write(p) || relaxed(p)) return;
            const auto batch = context_.place_ahead(*context_.regions.find(p.rkey), p.remote_addr,
                                                    source_of(p, nullptr), p.length, p.arrival);
            if (!batch) return;
            early_.add(*batch);
        }
        early_.looked(p.bytes);
    }
}

void Qp::publish_executed() {
    context_.show_completions();
    auto& consumer = inbound().consumer;
    consumer.tail.store(tail_, std::memory_order_release);
    consumer.acked.store(executed_, std::memory_order_seq_cst);
    ring_doorbell(remote_->header());
}

void Qp::refuse(ibv_wc_status at_requester, ibv_event_type event) {
    context_.show_completions();
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
    if (!rq_.empty()) {
        rnr_until_ = rnr_count_ = 0;
        return true;
    }
    rnr_count_ = std::min<std::uint64_t>(rnr_count_ + 1, 0xff);
    rnr_until_ = now + std::uint64_t{kRnrTimer[min_rnr_timer_]} * 10'000;
    wake_at = std::min(wake_at, rnr_until_);
    context_.show_completions();
    auto& consumer = inbound().consumer;
    consumer.acked.store(executed_, std::memory_order_release);
    consumer.rnr.store(((executed_ + 1) << 8) | rnr_count_, std::memory_order_seq_cst);
    ring_doorbell(remote_->header());
    return false;
}

void Qp::complete_receive(std::uint64_t wr_id, ibv_wc_status status, const Packet& p) {
    const Cq::Entry entry = Cq::received(this, qp_num, dest_qp_num_, wr_id, status, p);
    if (!context_.complete(recv_cq, entry)) enter_error();
}

bool Qp::execute(const Packet& p, const std::byte* payload, std::uint64_t now,
                 std::uint64_t& wake_at) {
    const bool tells = p.opcode == Opcode::write_imm;
    const bool known =
        (p.opcode == Opcode::write || tells) && (access_ & IBV_ACCESS_REMOTE_WRITE) != 0;
    const bool last = (p.flags & kLast) != 0;
    const bool takes = tells && last;
    // A packet that is to be refused, or waits for a receive, comes after those executed before.
    if (!moving_.empty() && (!known || !may_write(p) || (takes && rq_.empty()))) return false;
    if (!known) {
        refuse(IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
        return false;
    }
    if (!may_write(p)) {
        refuse(IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
        return false;
    }
    if (takes && !have_receive(now, wake_at)) return false;

    DeviceCopies::Batch batch = 0;
    const bool early = early_.has(tail_);
    if (early) {
        if (takes && !land_all()) return false;
        batch = early_.take(tail_);
    } else if (p.length != 0) {
        const PayloadSource source = source_of(p, payload);
        if (!source.reached()) {
            if (!moving_.empty()) return false;
            // A peer that was killed takes its memory along: silence, as from a dead card.
            deaf_ = !remote_->alive(now + 2'000'000);
            if (!deaf_) refuse(IBV_WC_REM_OP_ERR, IBV_EVENT_QP_REQ_ERR);
            return false;
        }
        if (takes && !land_all()) return false;
        if (!place(p, source, now, batch)) return false;
    } else if (takes && !land_all()) {
        return false;
    }
    if (takes) batch = std::max(batch, landing_);
    if (!context_.copies.done(batch) || !moving_.empty()) {
        moving_.push_back({p, batch, takes, takes ? rq_.take() : 0});
        return true;
    }
    if (takes) complete_receive(rq_.take(), IBV_WC_SUCCESS, p);
    if (last) ++executed_;
    return true;
}

bool Qp::settle() {
    bool settled = false;
    while (!moving_.empty() && context_.copies.done(moving_.front().batch)) {
        const Moving first = moving_.front();
        moving_.pop_front();
        if (first.takes) complete_receive(first.wr_id, IBV_WC_SUCCESS, first.packet);
        if ((first.packet.flags & kLast) != 0) ++executed_;
        settled = true;
    }
    if (settled) publish_executed();
    return settled;
}

PayloadSource Qp::source_of(const Packet& p, const std::byte* payload) const {
    if ((p.flags & kReference) == 0) return {payload, 0};
    return context_.find_payload(*remote_, p.flags, p.ref_fd, p.ref_inode, p.ref_offset, p.length);
}

bool Qp::place(const Packet& p, const PayloadSource& source, std::uint64_t now,
               DeviceCopies::Batch& batch) {
    // The last write of an immediate lands with it.
    const bool closes = p.opcode == Opcode::write_imm && (p.flags & kLast) != 0;
    if (closes || !relaxed(p)) {
        const Mr& mr = *context_.regions.find(p.rkey);
        return context_.place(mr, p.remote_addr, source, p.length, batch) != Context::Placed::busy;
    }
    if (held_.size() == kMaxHeld && !land_all()) return false;
    std::vector<std::byte> bytes = source.host != nullptr
                                       ? std::vector(source.host, source.host + p.length)
                                       : context_.fetch(source.device, p.length);
    if (bytes.size() != p.length) return false;
    const bool waits = context_.random() % 4 == 0;
    held_.push_back(
        {p, std::move(bytes), waits ? now + context_.random() % context_.config.hold_ns : now});
    return true;
}

bool Qp::relaxed(const Packet& p) const {
    const Mr* mr = context_.regions.find(p.rkey);
    return context_.config.relaxed ||
           (mr != nullptr && (mr->access & IBV_ACCESS_RELAXED_ORDERING) != 0);
}

// Lands in any order. Memory that was deregistered meanwhile is left alone.
bool Qp::land(const Held& held) {
    const Packet& p = held.packet;
    const Mr* mr = context_.regions.find(p.rkey);
    if (mr == nullptr || !mr->contains(p.remote_addr, p.length)) return true;
    DeviceCopies::Batch batch = 0;
    if (context_.place(*mr, p.remote_addr, {held.payload.data(), 0}, p.length, batch) ==
        Context::Placed::busy) {
        return false;
    }
    landing_ = std::max(landing_, batch);
    return true;
}

bool Qp::land(std::uint64_t now, std::uint64_t& wake_at) {
    if (held_.empty()) return false;
    std::shuffle(held_.begin(), held_.end(), context_.random);
    return std::erase_if(held_, [&](const Held& held) {
               if (held.not_before <= now) return land(held);
               wake_at = std::min(wake_at, held.not_before);
               return false;
           }) != 0;
}

bool Qp::land_all() {
    std::shuffle(held_.begin(), held_.end(), context_.random);
    std::erase_if(held_, [&](const Held& held) { return land(held); });
    return held_.empty();
}

}  // namespace mkernel::nics::softverbs
