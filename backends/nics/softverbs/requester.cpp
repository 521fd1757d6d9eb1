// The sending half of an RC queue pair: requests into the peer's ring, acknowledgements, time-outs.
#include <algorithm>
#include <cstring>

#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/queue_pair.hpp"

namespace mkernel::nics::softverbs {
namespace {

constexpr std::uint64_t kWatchNs = 2'000'000;  // how often a peer that owes an answer is looked at

// Vendor codes of this device, which distinguish causes that the status alone does not.
constexpr std::uint32_t kVendorTimeout = 0x81;
constexpr std::uint32_t kVendorNak = 0x82;
constexpr std::uint32_t kVendorLocal = 0x83;

}  // namespace

bool Qp::claim() {
    if (claimed_) return true;
    Ring& ring = outbound();
    if (ring.consumer.qp_num.load(std::memory_order_acquire) != dest_qp_num_) return false;
    // Packets of another sequence are dropped, as those of a stranger are.
    if (ring.consumer.state.load(std::memory_order_acquire) == RingState::responsive &&
        ring.consumer.psn.load(std::memory_order_relaxed) != sq_psn_) {
        return false;
    }
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
    const ibv_sge& source = r.source;
    if (source.length > context_.config.max_message) local_error_ = IBV_WC_LOC_LEN_ERR;
    if (source.length != 0 && !r.inlined) {
        const Mr* mr = context_.regions.find(source.lkey);
        if (mr == nullptr || mr->pd != pd || !mr->contains(source.addr, source.length)) {
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

std::byte* Qp::reserve(std::uint32_t bytes) {
    Ring& ring = outbound();
    return softverbs::reserve<Packet>(ring.data, head_,
                                      ring.consumer.tail.load(std::memory_order_acquire), bytes);
}

bool Qp::send_message(const SendRequest& r, std::uint64_t now) {
    const std::uint32_t total = r.source.length;
    do {
        const std::uint32_t left = total - cursor_;
        const std::byte* source = nullptr;
        const Backing* backing = nullptr;
        const DeviceBacking* device = nullptr;
        std::uint64_t ref_offset = 0;
        if (r.inlined) {
            source = inline_data_.data() + sq_sent_ % sq_.size() * cap_.max_inline_data + cursor_;
        } else if (left != 0) {
            const Mr* mr = context_.regions.find(r.source.lkey);
            source = reinterpret_cast<const std::byte*>(r.source.addr + cursor_);
            device = mr->device ? &*mr->device : nullptr;
            if (device != nullptr) {
                ref_offset = r.source.addr + cursor_ - reinterpret_cast<std::uint64_t>(mr->addr);
            } else if (context_.config.by_reference && left >= kReferenceFrom && mr->backing) {
                backing = &*mr->backing;
                ref_offset = backing->offset + r.source.addr + cursor_ -
                             reinterpret_cast<std::uint64_t>(mr->addr);
            }
        }
        const bool reference = backing != nullptr || device != nullptr;
        const std::uint32_t most = device != nullptr    ? kDeviceReference
                                   : backing != nullptr ? kMaxReference
                                                        : kMaxPayload;
        const std::uint32_t length = std::min(left, most);
        if (device != nullptr && !context_.told(*remote_)) return false;
        Packet p;
        p.bytes =
            static_cast<std::uint32_t>(sizeof(Packet)) + (reference ? 0 : align_packet(length));
        std::byte* at = reserve(p.bytes);
        if (at == nullptr) return false;
        p.opcode = r.tells ? Opcode::write_imm : Opcode::write;
        p.arrival = context_.link.depart(now, length);
        p.remote_addr = r.remote_addr + cursor_;
        p.rkey = r.rkey;
        p.imm = r.imm;
        p.length = length;
        p.total = total;
        if (cursor_ == 0) p.flags |= kFirst;
        if (cursor_ + length == total) p.flags |= kLast;
        if (backing != nullptr) {
            p.flags |= kReference;
            p.ref_fd = backing->fd.get();
            p.ref_inode = backing->inode;
            p.ref_offset = ref_offset;
        } else if (device != nullptr) {
            p.flags |= kReference | kDevice;
            p.ref_inode = device->token;
            p.ref_offset = ref_offset;
        } else if (length != 0) {
            std::memcpy(at + sizeof(Packet), source, length);
        }
        std::memcpy(at, &p, sizeof(p));
        head_ += p.bytes;
        cursor_ += length;
    } while (cursor_ < total);
    return true;
}

void Qp::complete_send(std::uint64_t number, ibv_wc_status status, std::uint32_t vendor_err) {
    const SendRequest& r = sq_[(number - 1) % sq_.size()];
    if (status == IBV_WC_SUCCESS && !r.signaled) return;
    Cq::Entry entry =
        Cq::ended(this, IBV_WC_RDMA_WRITE, qp_num, r.wr_id, r.source.length, status, vendor_err);
    entry.reclaim_to = number;
    if (!context_.complete(send_cq, entry)) enter_error();
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

}  // namespace mkernel::nics::softverbs
