// The proxy thread's part of VerbsNic: puts become messages, completions become progress, arrivals
// become signals. Nothing here allocates or locks.
#include <arpa/inet.h>

#include <algorithm>

#include "backends/nics/verbs/verbs_nic.hpp"

namespace mkernel::nics::verbs {
namespace {

constexpr std::uint32_t kAsyncEvery = 1024;  // polls between looks at the event descriptors
constexpr std::size_t kCompletions =
    64;  // taken from a queue a poll: a batch of puts brings two each
constexpr std::uint64_t kShareStep = 64;  // shares of a spread put begin at multiples of it

bool raises(const transport::PutCommand& c) {
    return c.signal != transport::PutCommand::kNoSignal && c.value != 0;
}

std::uint64_t share_begin(std::uint64_t bytes, std::uint32_t lane, std::uint32_t lanes) {
    return lane == lanes ? bytes : bytes / lanes * lane / kShareStep * kShareStep;
}

// One thread writes a counter: no read-modify-write is needed.
void count(std::atomic<std::uint64_t>& counter, std::uint64_t by) {
    counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

}  // namespace

PutResult VerbsNic::put(const transport::PutCommand& c, PutCursor& cursor) {
    if (failed()) return PutResult::failed;
    if (!cursor.begun) {
        if (!check(c)) return PutResult::failed;
        if (!begin(c, *peers_[c.peer], cursor)) return PutResult::busy;
    }
    Peer& peer = *peers_[c.peer];
    while (true) {
        if (!put_share(c, peer, cursor)) return failed() ? PutResult::failed : PutResult::busy;
        if (!cursor.spread || ++cursor.lane == peer.lanes.size()) break;
        cursor.bytes = 0;
        cursor.messages = 0;
    }
    return failed() ? PutResult::failed : PutResult::done;
}

// Chooses the put's way. Returns false where every number for a group is in use.
bool VerbsNic::begin(const transport::PutCommand& c, Peer& peer, PutCursor& cursor) {
    const auto lanes = static_cast<std::uint32_t>(peer.lanes.size());
    const bool large = lanes > 1 && c.bytes >= options_.stripe_bytes;
    cursor.grouped = raises(c) && (large || c.value > kMaxWholeValue ||
                                   (!traits_.in_order && c.bytes > max_message_));
    cursor.spread = large || cursor.grouped;
    if (cursor.grouped) {
        cursor.group = static_cast<std::uint32_t>(peer.groups_begun % kGroups);
        for (const auto& lane : peer.lanes) {
            if (lane->completed < lane->last_of[cursor.group]) return false;
        }
        ++peer.groups_begun;
    }
    if (!cursor.spread) {
        cursor.lane = peer.turn;
        if (++peer.turn == lanes) peer.turn = 0;
    }
    cursor.begun = true;
    return true;
}

// Stages the rest of the current lane's share: its data, then, on a group's first lane, signal and value.
// Returns false where there is no room.
bool VerbsNic::put_share(const transport::PutCommand& c, Peer& peer, PutCursor& cursor) {
    Lane& lane = *peer.lanes[cursor.lane];
    const auto lanes = static_cast<std::uint32_t>(peer.lanes.size());
    const std::uint64_t start = cursor.spread ? share_begin(c.bytes, cursor.lane, lanes) : 0;
    const std::uint64_t end =
        cursor.spread ? share_begin(c.bytes, cursor.lane + 1, lanes) : c.bytes;
    const bool tells = raises(c);
    std::uint32_t data = 1;
    if (end - start > max_message_) {
        data = static_cast<std::uint32_t>((end - start + max_message_ - 1) / max_message_);
    } else if (end == start && !tells) {
        data = 0;
    }
    const std::uint32_t closing = cursor.grouped && cursor.lane == 0 ? 2 : 0;
    const std::uint32_t told = (traits_.in_order ? 1 : data) + closing;
    while (cursor.messages < data + closing) {
        Write write;
        std::uint64_t length = 0;
        if (cursor.messages < data) {
            write.told = tells && (!traits_.in_order || cursor.messages + 1 == data);
            write.immediate = cursor.grouped ? pack_group(Kind::part, cursor.group, told)
                                             : pack_whole(c.signal & kMaxSignal, c.value);
            length = std::min(end - start - cursor.bytes, max_message_);
            if (length != 0) {
                const LocalRegion& here = regions_[c.region];
                const RemoteRegion& there = peer.regions[c.region];
                const std::uint64_t at = start + cursor.bytes;
                write.source = {here.address + c.local_offset + at,
                                static_cast<std::uint32_t>(length), here.lkeys[lane.rail]};
                write.remote_addr = there.address + c.remote_offset + at;
                write.rkey = there.rkeys[lane.remote_rail];
                write.device = here.rung != Rung::host;
            }
        } else {
            write.told = true;
            write.immediate = cursor.messages == data
                                  ? pack_group(Kind::signal, cursor.group, c.signal)
                                  : pack_group(Kind::value, cursor.group, c.value);
        }
        if (!room(lane, write.told) || !stage(lane, write)) return false;
        lane.told += write.told ? 1 : 0;
        count(lane.counts->messages, 1);
        count(lane.counts->bytes, length);
        cursor.bytes += length;
        ++cursor.messages;
    }
    if (cursor.grouped) lane.last_of[cursor.group] = lane.posted;
    return true;
}

// Returns true where there is room in our queue, and for an immediate at the peer.
bool VerbsNic::room(Lane& lane, bool told) const {
    if (free_slots(lane) == 0) return false;
    if (!told || lane.told < lane.allowed) return true;
    const std::atomic_ref<std::uint64_t> taken(lane.words->taken_there);
    lane.allowed = lane.remote_receives + taken.load(std::memory_order_acquire);
    return lane.told < lane.allowed;
}

void VerbsNic::list_ready(Lane& lane) {
    if (lane.listed_ready) return;
    lane.listed_ready = true;
    ready_.push_back(&lane);
}

void VerbsNic::ring() {
    std::erase_if(ready_, [this](Lane* lane) {
        lane->listed_ready = !hand_over(*lane);
        return !lane->listed_ready;
    });
}

void VerbsNic::post_receives(Lane& lane, std::uint32_t count) {
    while (count > 0) {
        const std::uint32_t batch = std::min(count, kChain);
        for (std::uint32_t i = 0; i < batch; ++i) {
            ibv_recv_wr& wr = lane.receives[i];
            wr = {};
            wr.wr_id = make_wr_id(true, lane.rank, lane.number, 0);
            wr.sg_list = traits_.receives_have_sge ? &lane.landing : nullptr;
            wr.num_sge = traits_.receives_have_sge ? 1 : 0;
            wr.next = i + 1 < batch ? &lane.receives[i + 1] : nullptr;
        }
        ibv_recv_wr* bad = nullptr;
        const int error = ibv_post_recv(lane.qp.get(), lane.receives.data(), &bad);
        if (error != 0) return post_failed(lane, 0, error, "ibv_post_recv");
        count -= batch;
    }
}

// Posts used receives again and, once a quarter of all were used, notifies the peer. One such message is in
// flight at a time, so its source stays as it is and no older one comes late. Returns false where it could
// not be sent now.
bool VerbsNic::settle_receives(Lane& lane) {
    post_receives(lane, lane.owed);
    lane.taken += lane.owed;
    lane.owed = 0;
    if (4 * (lane.taken - lane.taken_told) < receives_) return true;
    if (lane.completed < lane.told_by || free_slots(lane) == 0) return false;
    lane.words->taken_here = lane.taken;
    Write write;
    write.source = {reinterpret_cast<std::uint64_t>(&lane.words->taken_here),
                    sizeof(lane.words->taken_here), lane.words_key};
    write.remote_addr = lane.remote_word;
    write.rkey = lane.remote_word_key;
    if (!stage(lane, write)) return false;
    lane.taken_told = lane.taken;
    lane.told_by = lane.posted;
    hand_over(lane);
    return true;
}

void VerbsNic::complete(const ibv_wc& wc, SignalSink& sink) {
    if (wc.status != IBV_WC_SUCCESS) {
        // A flush is a consequence: its cause may lie in the events or further back in a queue.
        if (wc.status == IBV_WC_WR_FLUSH_ERR) {
            if (!flushed_) flushed_ = wc;
        } else {
            report(wc);
        }
        return;
    }
    Lane& lane = *peers_[wr_peer(wc.wr_id)]->lanes[wr_lane(wc.wr_id)];
    if (!wr_receive(wc.wr_id)) return sent(lane, wr_number(wc.wr_id, lane.posted));
    ++lane.owed;
    if (!lane.listed_owing) {
        lane.listed_owing = true;
        owing_.push_back(&lane);
    }
    if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) arrived(lane, wc, sink);
}

void VerbsNic::arrived(Lane& lane, const ibv_wc& wc, SignalSink& sink) {
    const std::uint32_t immediate = ntohl(wc.imm_data);
    Arrivals::Signal signal{payload_of(immediate), value_of(immediate)};
    if (is_group(immediate)) {
        switch (peers_[lane.rank]->arrivals->take(lane.number, immediate, signal)) {
            case Arrivals::Outcome::pending:
                return;
            case Arrivals::Outcome::complete:
                break;
            case Arrivals::Outcome::broken:
                return bad_arrival(lane, wc,
                                   "sent the immediate " + std::to_string(immediate) +
                                       ", which fits no group of messages under way");
        }
    }
    if (!visible_ && !make_visible()) return;
    if (!sink.raise(lane.rank, signal.signal, signal.value)) {
        bad_arrival(lane, wc,
                    "raised signal " + std::to_string(signal.signal) +
                        ", which this rank's signal pad does not have");
    }
}

// Flushes once for all completions that were polled together: their bytes were written before.
bool VerbsNic::make_visible() {
    for (std::size_t i = 0; i < kMaxFlushes; ++i) {
        const transport::DeviceFlush* device = device_flushes_[i].load(std::memory_order_acquire);
        if (device == nullptr) break;
        const int error = device->flush(device->self);
        if (error != 0) {
            Failure failure;
            failure.status = "FLUSH_FAILED";
            failure.vendor_err = static_cast<std::uint32_t>(-error);
            failure.message =
                "what arrived in device memory cannot be made visible: " + reason(-error);
            fail(std::move(failure));
            return false;
        }
    }
    return visible_ = true;
}

int VerbsNic::poll(SignalSink& sink) {
    if (failed()) return 0;
    int total = 0;
    std::array<ibv_wc, kCompletions> wcs;
    for (const auto& rail : rails_) {
        for (const auto& queue : rail->queues()) {
            const int count = ibv_poll_cq(queue.get(), static_cast<int>(wcs.size()), wcs.data());
            if (count < 0) {
                Failure failure;
                failure.status = "CQ_ERR";
                failure.message =
                    rail->name + ": ibv_poll_cq failed (" + std::to_string(count) + ")";
                fail(std::move(failure));
                return 0;
            }
            visible_ = false;
            for (int i = 0; i < count && !failed(); ++i) {
                complete(wcs[static_cast<std::size_t>(i)], sink);
            }
            total += count;
        }
    }
    if (flushed_ && !failed()) {
        read_events();
        if (total == 0 && !failed()) report(*flushed_);  // nothing else came: it is the first error
        return 1;
    }
    std::erase_if(owing_, [this](Lane* lane) {
        lane->listed_owing = !settle_receives(*lane);
        return !lane->listed_owing;
    });
    if (++polls_ % kAsyncEvery == 0) read_events();
    return total;
}

void VerbsNic::mark(std::uint32_t number) {
    for (const auto& peer : peers_) {
        if (!peer) continue;
        for (const auto& lane : peer->lanes) lane->marked[number] = lane->posted;
    }
}

bool VerbsNic::reached_mark(std::uint32_t number) const {
    for (const auto& peer : peers_) {
        if (!peer) continue;
        for (const auto& lane : peer->lanes) {
            if (lane->completed < lane->marked[number]) return false;
        }
    }
    return true;
}

void VerbsNic::arm() {
    for (const auto& rail : rails_) {
        for (const auto& queue : rail->queues()) ibv_req_notify_cq(queue.get(), 0);
    }
}

void VerbsNic::settle() {
    for (const auto& rail : rails_) rail->clear_completion_events();
    read_events();
}

}  // namespace mkernel::nics::verbs
