// Setting up: rails, peers, memory. The rest of the class is in data_path.cpp and failures.cpp.
#include "backends/nics/verbs/verbs_nic.hpp"

#include <algorithm>
#include <cerrno>

namespace mkernel::nics::verbs {

VerbsNic::VerbsNic(std::shared_ptr<const Verbs> verbs, const std::vector<PortName>& ports,
                   const Options& options, Traits traits)
    : verbs_(std::move(verbs)),
      options_(options),
      depth_(options.queue_depth),
      receives_(options.receive_depth),
      max_message_(UINT32_MAX),
      traits_(traits),
      regions_(new LocalRegion[kMaxRegions]) {
    if (ports.empty() || ports.size() > kMaxRails) {
        throw SetupError(std::to_string(ports.size()) + " rails; use 1 to " +
                         std::to_string(kMaxRails));
    }
    for (const PortName& name : ports) {
        const auto index = static_cast<std::uint32_t>(rails_.size());
        rails_.push_back(std::make_unique<Rail>(verbs_, index, name, options.gid_index));
        const Rail& rail = *rails_.back();
        const auto most = static_cast<std::uint32_t>(std::max(rail.limits.max_qp_wr, 4));
        depth_ = std::min(depth_, most);
        receives_ = std::min(receives_, most);
        max_message_ = std::min<std::uint64_t>(max_message_, rail.port.max_msg_sz);
        for (const int fd : rail.descriptors()) descriptors_.push_back(fd);
    }
}

VerbsNic::~VerbsNic() {
    close();
}

void VerbsNic::close() {
    ready_.clear();
    owing_.clear();
    peers_.clear();
    regions_.reset();
    descriptors_.clear();
    rails_.clear();
}

Capabilities VerbsNic::capabilities() const {
    Capabilities c;
    c.ordered = traits_.in_order && most_lanes_ == 1;
    c.dmabuf = !rails_.empty() && std::all_of(rails_.begin(), rails_.end(),
                                              [](const auto& rail) { return rail->takes_dmabuf; });
    c.peermem = options_.peermem;
    c.max_signal = kMaxSignal;
    c.max_value = kMaxValue;
    return c;
}

std::vector<Endpoint> VerbsNic::add_peer(std::uint32_t rank, std::span<const std::uint32_t> rails) {
    if (rank >= kMaxPeers) {
        throw SetupError("peer " + std::to_string(rank) + " is out of range; at most " +
                         std::to_string(kMaxPeers) + " ranks");
    }
    if (rank >= peers_.size()) peers_.resize(rank + 1);
    if (peers_[rank]) {
        throw SetupError("peer " + std::to_string(rank) + " already has queue pairs");
    }
    const auto count = static_cast<std::uint32_t>(rails.size());
    if (count == 0 || count > kMaxLanes) {
        throw SetupError("peer " + std::to_string(rank) + " is to have " + std::to_string(count) +
                         " queue pairs; use 1 to " + std::to_string(kMaxLanes));
    }
    for (const std::uint32_t rail : rails) {
        if (rail < rails_.size()) continue;
        throw SetupError("peer " + std::to_string(rank) + " is to have a queue pair on rail " +
                         std::to_string(rail) + " of " + std::to_string(rails_.size()));
    }
    auto peer = std::make_unique<Peer>();
    peer->rank = rank;
    peer->words.reset(new Words[count]);
    LocalMemory words;
    words.address = reinterpret_cast<std::uint64_t>(peer->words.get());
    words.bytes = count * sizeof(Words);
    for (const auto& rail : rails_) {
        peer->words_mrs.push_back(register_with(*rail, kMaxRegions, words, false).mr);
    }
    std::vector<Endpoint> endpoints;
    for (std::uint32_t i = 0; i < count; ++i) {
        peer->lanes.push_back(new_lane());
        Lane& lane = *peer->lanes.back();
        lane.rank = rank;
        lane.number = i;
        lane.rail = rails[i];
        lane.words = &peer->words[i];
        lane.words_key = peer->words_mrs[lane.rail]->lkey;
        lane.landing = {reinterpret_cast<std::uint64_t>(&lane.words->landing),
                        sizeof(lane.words->landing), lane.words_key};
        lane.queue = rails_[lane.rail]->queue(depth_ + receives_);
        Endpoint mine = rails_[lane.rail]->endpoint();
        open(lane, mine);
        mine.qp_num = lane.qp->qp_num;
        mine.receives = receives_;
        mine.credit_address = reinterpret_cast<std::uint64_t>(&lane.words->taken_there);
        mine.credit_rkey = peer->words_mrs[lane.rail]->rkey;
        post_receives(lane, receives_);
        endpoints.push_back(std::move(mine));
    }
    if (failed()) throw SetupError(failure()->message);
    for (const auto& lane : peer->lanes) {
        lane->counts = &counts_.emplace_back(rank, lane->number, lane->rail);
    }
    most_lanes_ = std::max(most_lanes_.load(), count);
    peers_[rank] = std::move(peer);
    ready_.reserve(counts_.size());
    owing_.reserve(counts_.size());
    return endpoints;
}

void VerbsNic::connect(std::uint32_t rank, const std::vector<Endpoint>& remote) {
    Peer& peer = peer_at(rank, "connect");
    if (peer.connected) {
        throw SetupError("peer " + std::to_string(rank) + " is connected already");
    }
    if (remote.size() != peer.lanes.size()) {
        throw SetupError("peer " + std::to_string(rank) + " made " + std::to_string(remote.size()) +
                         " queue pairs for this rank, which made " +
                         std::to_string(peer.lanes.size()) + " for it; both must follow one plan");
    }
    for (const auto& lane : peer.lanes) {
        const Endpoint& end = remote[lane->number];
        if (end.rail >= kMaxRails || end.receives == 0) {
            throw SetupError("peer " + std::to_string(rank) + " sent an endpoint on rail " +
                             std::to_string(end.rail) + " with " + std::to_string(end.receives) +
                             " receives; at most " + std::to_string(kMaxRails) +
                             " rails, and at least 1 receive");
        }
        lane->remote_rail = end.rail;
        lane->allowed = lane->remote_receives = end.receives;
        lane->remote_word = end.credit_address;
        lane->remote_word_key = end.credit_rkey;
        join(*lane, end);
    }
    peer.arrivals.emplace(static_cast<std::uint32_t>(peer.lanes.size()), receives_);
    peer.connected = true;
}

VerbsNic::Peer& VerbsNic::peer_at(std::uint32_t rank, const char* what) {
    if (rank >= peers_.size() || !peers_[rank]) {
        throw SetupError(std::string(what) + ": peer " + std::to_string(rank) +
                         " has no queue pair; call address(peer) first");
    }
    return *peers_[rank];
}

void VerbsNic::check_region(std::uint32_t region) {
    if (region < kMaxRegions) return;
    throw SetupError("region " + std::to_string(region) + " is out of range; use 0 to " +
                     std::to_string(kMaxRegions - 1));
}

RemoteKey VerbsNic::register_memory(std::uint32_t region, const LocalMemory& memory) {
    check_region(region);
    LocalRegion& mine = regions_[region];
    if (mine.ready.load(std::memory_order_acquire)) {
        throw SetupError("region " + std::to_string(region) + " is registered already");
    }
    if (memory.flush != nullptr) list_flush(memory.flush);
    RemoteKey key{memory.address, memory.bytes, {}};
    std::array<std::shared_ptr<ibv_mr>, kMaxRails> mrs;
    for (const auto& rail : rails_) {
        auto [mr, rung] = register_with(*rail, region, memory, options_.peermem);
        mine.rung = rung;
        mine.lkeys[rail->index] = mr->lkey;
        key.rkeys.push_back(mr->rkey);
        mrs[rail->index] = std::move(mr);
    }
    mine.mrs = std::move(mrs);
    mine.address = memory.address;
    mine.bytes = memory.bytes;
    ++registered_[static_cast<std::size_t>(mine.rung)];
    mine.ready.store(true, std::memory_order_release);
    return key;
}

void VerbsNic::bind(std::uint32_t region, std::uint32_t rank, const RemoteKey& key) {
    const Peer& peer = peer_at(rank, "bind");
    check_region(region);
    RemoteRegion& remote = peer.regions[region];
    if (remote.bound.load(std::memory_order_acquire)) {
        throw SetupError("region " + std::to_string(region) + " is bound already at peer " +
                         std::to_string(rank));
    }
    for (const auto& lane : peer.lanes) {
        if (lane->remote_rail >= key.rkeys.size()) {
            throw SetupError("region " + std::to_string(region) + " of peer " +
                             std::to_string(rank) + " has keys of " +
                             std::to_string(key.rkeys.size()) + " rails, and rail " +
                             std::to_string(lane->remote_rail) + " is in use");
        }
    }
    remote.address = key.address;
    remote.bytes = key.bytes;
    std::copy_n(key.rkeys.begin(), std::min<std::size_t>(key.rkeys.size(), kMaxRails),
                remote.rkeys.begin());
    remote.bound.store(true, std::memory_order_release);
}

void VerbsNic::withdraw(std::uint32_t region) {
    check_region(region);
    regions_[region].ready.store(false, std::memory_order_seq_cst);
    for (const auto& peer : peers_) {
        if (peer) peer->regions[region].bound.store(false, std::memory_order_seq_cst);
    }
}

void VerbsNic::deregister_memory(std::uint32_t region) {
    withdraw(region);
    LocalRegion& mine = regions_[region];
    if (!mine.mrs[0]) return;
    mine.mrs = {};
    --registered_[static_cast<std::size_t>(mine.rung)];
}

// It stays listed until the NIC is closed: one flush more does no harm.
void VerbsNic::list_flush(const transport::DeviceFlush* flush) {
    for (auto& each : device_flushes_) {
        if (each == flush) return;
        if (each == nullptr) {
            each.store(flush, std::memory_order_release);
            return;
        }
    }
    throw SetupError("regions of more than " + std::to_string(kMaxFlushes) +
                     " devices that need a flush; register those of one device with a session");
}

Registrations VerbsNic::registrations() const {
    return {registered_[static_cast<std::size_t>(Rung::host)],
            registered_[static_cast<std::size_t>(Rung::dmabuf)],
            registered_[static_cast<std::size_t>(Rung::peermem)]};
}

std::vector<LaneCounts> VerbsNic::lanes() const {
    std::vector<LaneCounts> found;
    for (const Counts& each : counts_) {
        found.push_back({each.peer, each.lane, each.rail,
                         each.messages.load(std::memory_order_relaxed),
                         each.bytes.load(std::memory_order_relaxed)});
    }
    return found;
}

void VerbsNic::inject_failure(std::uint32_t rank) {
    Lane& lane = *peer_at(rank, "inject_failure").lanes.front();
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    const int error = verbs_->modify_qp(lane.qp.get(), &attr, IBV_QP_STATE);
    if (error != 0) throw SetupError(rail_of(lane).name + ": QP to ERR failed: " + reason(error));
}

}  // namespace mkernel::nics::verbs
