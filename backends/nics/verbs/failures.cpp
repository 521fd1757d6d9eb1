// The refusals and reports of VerbsNic. The first failure is the session's; see Nic::fail.
#include "backends/nics/verbs/verbs_nic.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::nics::verbs {

static_assert(transport::SignalPad::kMostSignals == kMaxSignal + 1,
              "a pad has as many signals as an immediate can name");

namespace {

std::string text(std::uint64_t number) {
    return std::to_string(number);
}

}  // namespace

bool VerbsNic::check(const transport::PutCommand& c) {
    if (c.peer >= peers_.size() || !peers_[c.peer] || !peers_[c.peer]->connected) {
        reject(c, "not a connected peer; the route should not lead through this NIC");
        return false;
    }
    if (c.signal != transport::PutCommand::kNoSignal &&
        (c.signal > kMaxSignal || c.value > kMaxValue)) {
        reject(c, "signal " + text(c.signal) + " with value " + text(c.value) + "; signals up to " +
                      text(kMaxSignal) + " and values up to " + text(kMaxValue) +
                      " fit the immediate");
        return false;
    }
    if (c.bytes == 0) return true;
    if (c.region >= kMaxRegions || !regions_[c.region].ready.load(std::memory_order_acquire) ||
        !peers_[c.peer]->regions[c.region].bound.load(std::memory_order_acquire)) {
        reject(c, "the region is not registered here and bound at the peer");
        return false;
    }
    const std::uint64_t here = regions_[c.region].bytes;
    const std::uint64_t there = peers_[c.peer]->regions[c.region].bytes;
    if (c.local_offset > here || c.bytes > here - c.local_offset || c.remote_offset > there ||
        c.bytes > there - c.remote_offset) {
        reject(c, "offsets " + text(c.local_offset) + " here (of " + text(here) + " bytes) and " +
                      text(c.remote_offset) + " there (of " + text(there) + ") leave the region");
        return false;
    }
    if (c.bytes > max_message_ * (kMaxMessages - 2)) {
        reject(c, "more than " + text(kMaxMessages - 2) + " messages of " + text(max_message_) +
                      " bytes; cut it into several puts");
        return false;
    }
    return true;
}

void VerbsNic::post_failed(const Lane& lane, std::uint64_t wr_id, int error, const char* call) {
    Failure failure;
    failure.status = "POST_FAILED";
    failure.qp = lane.qp->qp_num;
    failure.wr_id = wr_id;
    failure.vendor_err = static_cast<std::uint32_t>(error);
    failure.peer = lane.rank;
    failure.message = rail_of(lane).name + ": " + call + " for rank " + text(lane.rank) +
                      " failed: " + reason(error);
    fail(std::move(failure));
}

void VerbsNic::report(const ibv_wc& wc) {
    const Lane& lane = *peers_[wr_peer(wc.wr_id)]->lanes[wr_lane(wc.wr_id)];
    Failure failure;
    failure.status = status_name(wc.status);
    failure.qp = wc.qp_num;
    failure.wr_id = wc.wr_id;
    failure.vendor_err = wc.vendor_err;
    failure.peer = lane.rank;
    failure.message = rail_of(lane).name + ": " +
                      (wr_receive(wc.wr_id) ? "receive from" : "put to") + " rank " +
                      text(lane.rank) + " completed with " + failure.status + " (QP " +
                      text(wc.qp_num) + ", lane " + text(lane.number) + ", wr_id " +
                      text(wc.wr_id) + ", vendor code " + text(wc.vendor_err) + ")";
    fail(std::move(failure));
}

void VerbsNic::bad_arrival(const Lane& lane, const ibv_wc& wc, const std::string& what) {
    Failure failure;
    failure.status = "INVALID_PUT";
    failure.qp = wc.qp_num;
    failure.wr_id = wc.wr_id;
    failure.peer = lane.rank;
    failure.message = "rank " + text(lane.rank) + " " + what;
    fail(std::move(failure));
}

// Reads the contexts' events, as their only reader.
void VerbsNic::read_events() {
    for (const auto& rail : rails_) {
        ibv_async_event event{};
        while (verbs_->get_async_event(rail->context.get(), &event) == 0) {
            read_event(*rail, event);
            verbs_->ack_async_event(&event);
        }
    }
}

// Makes an event that breaks the NIC its failure; the rest is dropped.
void VerbsNic::read_event(const Rail& rail, const ibv_async_event& event) {
    Failure failure;
    switch (event.event_type) {
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
            for (const auto& peer : peers_) {
                if (!peer) continue;
                for (const auto& lane : peer->lanes) {
                    if (lane->qp.get() != event.element.qp) continue;
                    failure.peer = lane->rank;
                    failure.qp = lane->qp->qp_num;
                }
            }
            break;
        case IBV_EVENT_PORT_ERR:
            if (event.element.port_num != rail.port_number) return;  // another port of the device
            break;
        case IBV_EVENT_CQ_ERR:
        case IBV_EVENT_DEVICE_FATAL:
        case IBV_EVENT_WQ_FATAL:
            break;
        default:
            return;
    }
    failure.status = event_name(event.event_type);
    failure.message =
        rail.name + ": asynchronous event " + failure.status +
        (failure.peer >= 0 ? " on a queue pair of rank " + std::to_string(failure.peer)
                           : std::string());
    fail(std::move(failure));
}

}  // namespace mkernel::nics::verbs
