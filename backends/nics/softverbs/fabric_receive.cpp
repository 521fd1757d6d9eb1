// The fabric's receiving half: packets from flows, placed in any order, then receives and answers.
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/fabric.hpp"

namespace mkernel::nics::softverbs {
namespace {

constexpr std::uint64_t kLate = 25;  // a second placement in eight is held so much longer
constexpr std::uint64_t kRnrNs = 20'000'000;
constexpr std::uint64_t kTurnBytes = 1024 * 1024;
constexpr int kTurnPackets = 128;

bool runs(std::int32_t pid) {
    return ::kill(pid, 0) == 0 || errno != ESRCH;
}

}  // namespace

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
    std::erase_if(moving_, [&in](const Moving& each) { return each.flow == &in; });
}

SrdQp* Fabric::receiver(std::uint32_t number) const {
    const auto found = qps_.find(number);
    return found != qps_.end() && found->second->receives() ? found->second.get() : nullptr;
}

// Returns the error of a message, as far as its first packet shows one.
ibv_wc_status Fabric::judge(const Incoming& in, const FlowPacket& p) const {
    const bool known = std::any_of(handles_.begin(), handles_.end(), [&in](const auto& ah) {
        return ah->address.cookie == in.from.cookie;
    });
    if (!known) return IBV_WC_REM_OP_ERR;
    // A wrong queue key is answered as a wrong number.
    const SrdQp* qp = receiver(p.destination);
    if (qp == nullptr || qp->queue_key != p.queue_key) return IBV_WC_REM_INV_RD_REQ_ERR;
    if (p.total == 0) return IBV_WC_SUCCESS;
    return may_write(*qp, p, p.total) ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
}

bool Fabric::may_write(const SrdQp& qp, const FlowPacket& p, std::uint32_t bytes) const {
    const Mr* mr = context_.regions.find(p.rkey);
    return mr != nullptr && mr->pd == qp.qp_base.pd &&
           (mr->access & IBV_ACCESS_REMOTE_WRITE) != 0 && mr->contains(p.remote_addr, bytes);
}

// Takes packets from the flow into the set that waits to be placed.
bool Fabric::take(Incoming& in, std::uint64_t now, std::uint64_t& wake_at) {
    Flow& flow = context_.port.flow(in.index);
    const std::uint64_t head = flow.sender.head.load(std::memory_order_seq_cst);
    const auto& config = context_.config;
    const std::uint64_t hold = config.hold_ns;
    const std::uint64_t before = in.tail;
    while (in.tail != head) {
        const std::byte* at = flow.data + in.tail % kRingBytes;
        FlowPacket p;
        std::memcpy(&p, at, sizeof(p));
        if (!readable(p, in.tail)) {
            in.tail = head;  // not a packet: nothing after it can be read either
            break;
        }
        if (p.opcode == Opcode::pad) {
            in.tail += p.bytes;
            continue;
        }
        if (placements_.size() >= ((p.flags & kDevice) != 0 ? kDevicePlacements : kPlacements))
            break;
        if (!context_.link.arrived(p.arrival, now, wake_at)) break;
        context_.link.take(p.arrival, p.length);
        const DeviceCopies::Batch batch = in.early.take(in.tail);
        in.tail += p.bytes;
        if ((p.flags & kAbandoned) != 0) {
            give_up(in, p.message);
            continue;
        }
        Arriving& message = in.place_of(p.message);
        if (message.number != p.message) message = {.number = p.message};
        if (p.offset == 0) {
            message.message = p.whole();
            message.status = judge(in, p);
        }
        message.taken += p.length;
        Placement placement{&in, p, {at + sizeof(p), at + sizeof(p) + in_ring(p)}, now, batch};
        if (config.reorder && random_() % 4 == 0) placement.not_before += random_() % hold;
        ++message.outstanding;
        if (random_() % 100 < config.duplicates) {
            ++message.outstanding;
            Placement again = placement;
            again.batch = 0;
            again.again = true;
            if (config.reorder) again.not_before += random_() % hold;
            if (config.reorder && random_() % 8 == 0)
                again.not_before += random_() % (kLate * hold);
            placements_.push_back(std::move(again));
        }
        placements_.push_back(std::move(placement));
    }
    copy_ahead(in, head, now);
    if (in.tail == before) return false;
    flow.receiver.tail.store(in.tail, std::memory_order_release);
    ring_doorbell(in.sender->header());
    return true;
}

// Queues the copies of packets that are on the link. A packet that is held, or placed twice, is so when it
// arrives.
void Fabric::copy_ahead(Incoming& in, std::uint64_t head, std::uint64_t now) {
    const Flow& flow = context_.port.flow(in.index);
    for (std::uint64_t at = in.early.look_on(in.tail); at != head; at = in.early.look_on(at)) {
        FlowPacket p;
        std::memcpy(&p, flow.data + at % kRingBytes, sizeof(p));
        if (!readable(p, at)) return;
        if ((p.flags & kDevice) != 0) {
            const SrdQp* qp = receiver(p.destination);
            if (p.arrival <= now || qp == nullptr || qp->queue_key != p.queue_key ||
                !may_write(*qp, p, p.length)) {
                return;
            }
            const PayloadSource source = context_.find_payload(*in.sender, p.flags, p.ref_fd,
                                                               p.ref_inode, p.ref_offset, p.length);
            const auto batch = context_.place_ahead(*context_.regions.find(p.rkey), p.remote_addr,
                                                    source, p.length, p.arrival);
            if (!batch) return;
            in.early.add(*batch);
        }
        in.early.looked(p.bytes);
    }
}

// Gives up a message that the sender has abandoned, of which nothing or a part has come.
void Fabric::give_up(Incoming& in, std::uint64_t number) {
    Arriving& message = in.place_of(number);
    if (message.number != number) return reply(in, number, IBV_WC_REM_ABORT_ERR);
    message.status = IBV_WC_REM_ABORT_ERR;
    message.message.total = message.taken;  // it ends here
    if (message.outstanding == 0) finish(in, number, message);
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
        const std::size_t under_way = moving_.size();
        if (!execute(placement, now)) {
            placements_.push_back(std::move(placement));
            break;
        }
        if (moving_.size() == under_way) moved += placement.packet.length;
        worked = true;
    }
    return worked;
}

bool Fabric::execute(Placement& placement, std::uint64_t now) {
    Incoming& in = *placement.flow;
    const FlowPacket& p = placement.packet;
    Arriving& message = in.place_of(p.message);
    if (message.status == IBV_WC_SUCCESS) {
        PayloadSource source{placement.payload.data(), 0};
        if ((p.flags & kReference) != 0 && placement.batch == 0) {
            source = context_.find_payload(*in.sender, p.flags, p.ref_fd, p.ref_inode, p.ref_offset,
                                           p.length);
        }
        const Mr* mr = context_.regions.find(p.rkey);
        if (receiver(p.destination) == nullptr) {
            message.status = IBV_WC_REM_INV_RD_REQ_ERR;  // destroyed, or in error, since
        } else if (p.length == 0) {
            // Nothing to place.
        } else if (placement.batch != 0) {
            if (!context_.copies.done(placement.batch)) {
                moving_.push_back({&in, p.message, placement.batch});
                return true;
            }
        } else if (!source.reached()) {
            message.status = IBV_WC_REM_ABORT_ERR;  // the sender took its memory back
        } else if (mr == nullptr || !mr->contains(p.remote_addr, p.length)) {
            message.status = IBV_WC_REM_ACCESS_ERR;  // deregistered since
        } else {
            DeviceCopies::Batch batch = 0;
            const std::uint64_t due = placement.again ? now + context_.link.lead(0) : 0;
            const auto placed = context_.place(*mr, p.remote_addr, source, p.length, batch, due);
            if (placed == Context::Placed::busy) return false;
            if (placed == Context::Placed::later) {
                moving_.push_back({&in, p.message, batch});
                return true;
            }
        }
    }
    end_placement(in, p.message);
    return true;
}

void Fabric::end_placement(Incoming& in, std::uint64_t number) {
    Arriving& message = in.place_of(number);
    if (--message.outstanding == 0 && message.taken == message.message.total) {
        finish(in, number, message);
    }
}

// Ends messages that waited for copies that are done, in the order in which they were placed.
bool Fabric::settle() {
    return std::erase_if(moving_, [this](const Moving& each) {
               if (!context_.copies.done(each.batch)) return false;
               end_placement(*each.flow, each.message);
               return true;
           }) != 0;
}

// Finishes a message, every byte of which is placed: the receive and the answer.
void Fabric::finish(Incoming& in, std::uint64_t number, Arriving& message) {
    const FlowMessage& whole = message.message;
    if (message.status == IBV_WC_SUCCESS && whole.opcode == Opcode::write_imm) {
        SrdQp* const qp = receiver(whole.destination);
        if (qp == nullptr) {
            message.status = IBV_WC_REM_INV_RD_REQ_ERR;
        } else if (qp->rq_.empty()) {
            in.unready.push_back(number);
            return;
        } else {
            qp->complete_receive(qp->rq_.take(), IBV_WC_SUCCESS, whole);
        }
    }
    reply(in, number, message.status);
    message.number = UINT64_MAX;
}

// Retries messages for which there was no receive, in the order in which they became whole.
bool Fabric::retry_unready(Incoming& in, std::uint64_t now, std::uint64_t& wake_at) {
    if (in.unready.empty()) return false;
    bool worked = false;
    std::vector<std::uint64_t> waiting;
    waiting.swap(in.unready);
    for (const std::uint64_t number : waiting) {
        Arriving& message = in.place_of(number);
        if (message.rnr_since == 0) message.rnr_since = now;
        const std::uint64_t budget = (message.message.rnr_retry + 1u) * kRnrNs;
        if (message.message.rnr_retry != 7 && now - message.rnr_since >= budget) {
            message.status = IBV_WC_RNR_RETRY_EXC_ERR;
        }
        finish(in, number, message);
    }
    worked = in.unready.size() != waiting.size();
    if (!in.unready.empty()) wake_at = std::min(wake_at, now + kRnrNs);
    return worked;
}

void Fabric::reply(Incoming& in, std::uint64_t message, ibv_wc_status status) {
    Flow& flow = context_.port.flow(in.index);
    flow.acks[in.answered % kFlowWindow].store((message << 8) | static_cast<std::uint64_t>(status),
                                               std::memory_order_relaxed);
    ++in.answered;
}

// Makes the answers visible, once for all of a step.
void Fabric::show_answers(Incoming& in) {
    if (in.shown == in.answered) return;
    in.shown = in.answered;
    context_.show_completions();
    context_.port.flow(in.index).receiver.answered.store(in.answered, std::memory_order_seq_cst);
    ring_doorbell(in.sender->header());
}

}  // namespace mkernel::nics::softverbs
