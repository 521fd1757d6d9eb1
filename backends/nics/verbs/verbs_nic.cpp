#include "backends/nics/verbs/verbs_nic.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "backends/nics/verbs/devices.hpp"

namespace mkernel::nics::verbs {
namespace {

constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;
constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << 40) - 1;
constexpr std::uint32_t kAsyncEvery = 1024;  // polls between looks at the event descriptor

std::uint32_t wr_peer(std::uint64_t wr_id) {
    return static_cast<std::uint32_t>((wr_id & ~kReceiveBit) >> 40);
}

void set_nonblocking(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

std::uint64_t make_wr_id(bool receive, std::uint32_t peer, std::uint64_t number) {
    return (receive ? kReceiveBit : 0) | (std::uint64_t{peer} << 40) | (number & kNumberMask);
}

std::string reason(int error) {
    return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

VerbsNic::VerbsNic(std::shared_ptr<const Verbs> verbs, const std::string& device,
                   const DeviceOptions& options)
    : verbs_(std::move(verbs)),
      device_(device),
      depth_(options.queue_depth),
      port_number_(options.port),
      context_(open_device(verbs_, device)),
      regions_(new LocalRegion[kMaxRegions]) {
    if (int error = verbs_->query_device(context_.get(), &limits_); error != 0) {
        throw SetupError(device + ": ibv_query_device failed: " + reason(error));
    }
    if (int error = verbs_->query_port(context_.get(), port_number_, &port_); error != 0) {
        throw SetupError(device + ": ibv_query_port(" + std::to_string(port_number_) +
                         ") failed: " + reason(error));
    }
    if (port_.state != IBV_PORT_ACTIVE) {
        throw SetupError(device + " port " + std::to_string(port_number_) +
                         " is not active (state " + std::to_string(port_.state) +
                         "); bring its link up");
    }
    const auto gid = choose_gid(*verbs_, context_.get(), port_number_, port_, options.gid_index);
    gid_ = gid.gid;
    gid_index_ = gid.index;
    const auto most = static_cast<std::uint32_t>(std::max(limits_.max_qp_wr, 4));
    depth_ = std::min(depth_, most);
    receives_ = std::min(kReceives, most);

    ibv_pd* pd = verbs_->alloc_pd(context_.get());
    if (pd == nullptr) throw SetupError(device + ": ibv_alloc_pd failed: " + reason(errno));
    pd_ = {pd, [v = verbs_, c = context_](ibv_pd* p) { v->dealloc_pd(p); }};
    ibv_comp_channel* channel = verbs_->create_comp_channel(context_.get());
    if (channel == nullptr) {
        throw SetupError(device + ": ibv_create_comp_channel failed: " + reason(errno));
    }
    channel_ = {channel,
                [v = verbs_, c = context_](ibv_comp_channel* p) { v->destroy_comp_channel(p); }};
    set_nonblocking(channel_->fd);
    set_nonblocking(context_->async_fd);
    descriptors_ = {channel_->fd, context_->async_fd};
}

VerbsNic::~VerbsNic() {
    close();
}

void VerbsNic::close() {
    peers_.clear();
    ready_.clear();
    owing_.clear();
    queues_.clear();
    regions_.reset();
    channel_.reset();
    pd_.reset();
    context_.reset();
}

std::shared_ptr<ibv_cq> VerbsNic::queue_for_next_peer() {
    const std::uint32_t each = depth_ + receives_;
    const auto limit = static_cast<std::uint32_t>(std::max(limits_.max_cqe, 1));
    const std::uint32_t sharing = std::clamp(limit / each, 1u, kPeersPerQueue);
    if (!queues_.empty() && peer_count_ % sharing != 0) return queues_.back();
    ibv_cq* cq =
        verbs_->create_cq(context_.get(), static_cast<int>(std::min(each * sharing, limit)),
                          nullptr, channel_.get(), 0);
    if (cq == nullptr) {
        throw SetupError(device_ + ": ibv_create_cq of " + std::to_string(each * sharing) +
                         " entries failed: " + reason(errno) +
                         "; lower queue_depth or raise the limit of locked memory");
    }
    queues_.emplace_back(
        cq, [v = verbs_, c = context_, ch = channel_](ibv_cq* p) { v->destroy_cq(p); });
    return queues_.back();
}

void VerbsNic::prepare(Peer& peer, std::uint32_t rank) {
    if (rank >= kMaxPeers) {
        throw SetupError("peer " + std::to_string(rank) + " is out of range; at most " +
                         std::to_string(kMaxPeers) + " ranks");
    }
    if (rank >= peers_.size()) peers_.resize(rank + 1);
    if (peers_[rank]) {
        throw SetupError("peer " + std::to_string(rank) + " already has a queue pair");
    }
    peer.rank = rank;
    peer.queue = queue_for_next_peer();
}

void VerbsNic::own(Peer& peer, ibv_qp* qp) {
    if (qp == nullptr) {
        throw SetupError(device_ + ": no queue pair for peer " + std::to_string(peer.rank) + ": " +
                         reason(errno) + "; lower queue_depth or raise the limit of locked memory");
    }
    peer.qp = {qp, [v = verbs_, c = context_, p = pd_, q = peer.queue](ibv_qp* each) {
                   v->destroy_qp(each);
               }};
}

void VerbsNic::adopt(std::unique_ptr<Peer> peer) {
    post_receives(*peer, receives_);
    if (failed()) throw SetupError(device_ + ": " + failure()->message);
    const std::uint32_t rank = peer->rank;
    peers_[rank] = std::move(peer);
    ++peer_count_;
    ready_.reserve(peer_count_);
    owing_.reserve(peer_count_);
}

Endpoint VerbsNic::endpoint_of(const Peer& peer) const {
    Endpoint mine;
    mine.qp_num = peer.qp->qp_num;
    mine.lid = port_.lid;
    mine.mtu = 128u << static_cast<unsigned>(port_.active_mtu);
    mine.gid = gid_text(gid_);
    mine.ethernet = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
    return mine;
}

::ibv_gid VerbsNic::remote_gid(std::uint32_t rank, const Endpoint& remote) const {
    const bool ethernet = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (ethernet != remote.ethernet) {
        throw SetupError("peer " + std::to_string(rank) + " is on " +
                         (remote.ethernet ? "Ethernet" : "InfiniBand") + ", " + device_ + " on " +
                         (ethernet ? "Ethernet" : "InfiniBand") +
                         "; choose devices of one link layer");
    }
    const auto gid = parse_gid(remote.gid);
    if (!gid) {
        throw SetupError("peer " + std::to_string(rank) + " sent the GID '" + remote.gid +
                         "'; expected 32 hexadecimal digits");
    }
    return *gid;
}

VerbsNic::Peer& VerbsNic::peer_at(std::uint32_t rank, const char* what) {
    if (rank >= peers_.size() || !peers_[rank]) {
        throw SetupError(std::string(what) + ": peer " + std::to_string(rank) +
                         " has no queue pair; call address(peer) first");
    }
    return *peers_[rank];
}

RemoteKey VerbsNic::register_memory(std::uint32_t region, std::uint64_t address,
                                    std::uint64_t bytes) {
    if (region >= kMaxRegions) {
        throw SetupError("region " + std::to_string(region) + " is out of range; use 0 to " +
                         std::to_string(kMaxRegions - 1));
    }
    LocalRegion& mine = regions_[region];
    if (mine.ready.load(std::memory_order_acquire)) {
        throw SetupError("region " + std::to_string(region) + " is registered already");
    }
    // Strictly ordered: no IBV_ACCESS_RELAXED_ORDERING.
    ibv_mr* mr =
        verbs_->reg_mr(pd_.get(), reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)),
                       bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (mr == nullptr) {
        throw SetupError(device_ + ": ibv_reg_mr of region " + std::to_string(region) + " (" +
                         std::to_string(bytes) + " bytes) failed: " + reason(errno) +
                         "; check the address and the limit of locked memory (ulimit -l)");
    }
    mine.mr = {mr, [v = verbs_, c = context_, p = pd_](ibv_mr* each) { v->dereg_mr(each); }};
    mine.address = address;
    mine.bytes = bytes;
    mine.lkey = mr->lkey;
    mine.ready.store(true, std::memory_order_release);
    return {address, bytes, mr->rkey};
}

void VerbsNic::bind(std::uint32_t region, std::uint32_t rank, const RemoteKey& key) {
    Peer& peer = peer_at(rank, "bind");
    if (region >= kMaxRegions) {
        throw SetupError("region " + std::to_string(region) + " is out of range; use 0 to " +
                         std::to_string(kMaxRegions - 1));
    }
    auto& remote = peer.regions[region];
    if (remote.bound.load(std::memory_order_acquire)) {
        throw SetupError("region " + std::to_string(region) + " is bound already at peer " +
                         std::to_string(rank));
    }
    remote.key = key;
    remote.bound.store(true, std::memory_order_release);
}

void VerbsNic::inject_failure(std::uint32_t rank) {
    Peer& peer = peer_at(rank, "inject_failure");
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    const int error = verbs_->modify_qp(peer.qp.get(), &attr, IBV_QP_STATE);
    if (error != 0) throw SetupError(device_ + ": QP to ERR failed: " + reason(error));
}

void VerbsNic::reject(const PutCommand& c, const std::string& why) {
    Failure failure;
    failure.status = "INVALID_PUT";
    failure.peer = c.peer;
    failure.message = "put of " + std::to_string(c.bytes) + " bytes of region " +
                      std::to_string(c.region) + " to rank " + std::to_string(c.peer) + ": " + why;
    fail(std::move(failure));
}

bool VerbsNic::check(const PutCommand& c, std::uint32_t max_signal, std::uint32_t max_value) {
    if (c.peer >= peers_.size() || !peers_[c.peer] || !peers_[c.peer]->connected) {
        reject(c, "not a connected peer; the route should not lead through this NIC");
        return false;
    }
    if (c.signal != PutCommand::kNoSignal && (c.signal > max_signal || c.value > max_value)) {
        reject(c, "signal " + std::to_string(c.signal) + " with value " + std::to_string(c.value) +
                      "; signals up to " + std::to_string(max_signal) + " and values up to " +
                      std::to_string(max_value) + " fit the immediate");
        return false;
    }
    if (c.bytes == 0) return true;
    if (c.region >= kMaxRegions || !regions_[c.region].ready.load(std::memory_order_acquire) ||
        !peers_[c.peer]->regions[c.region].bound.load(std::memory_order_acquire)) {
        reject(c, "the region is not registered here and bound at the peer");
        return false;
    }
    const std::uint64_t here = regions_[c.region].bytes;
    const std::uint64_t there = peers_[c.peer]->regions[c.region].key.bytes;
    if (c.local_offset > here || c.bytes > here - c.local_offset || c.remote_offset > there ||
        c.bytes > there - c.remote_offset) {
        reject(c, "offsets " + std::to_string(c.local_offset) + " here (of " +
                      std::to_string(here) + " bytes) and " + std::to_string(c.remote_offset) +
                      " there (of " + std::to_string(there) + ") leave the region");
        return false;
    }
    return true;
}

void VerbsNic::list_ready(Peer& peer) {
    if (peer.listed_ready) return;
    peer.listed_ready = true;
    ready_.push_back(&peer);
}

void VerbsNic::ring() {
    std::erase_if(ready_, [this](Peer* peer) {
        peer->listed_ready = !hand_over(*peer);
        return !peer->listed_ready;
    });
}

void VerbsNic::post_failed(const Peer& peer, std::uint64_t wr_id, int error, const char* call) {
    Failure failure;
    failure.status = "POST_FAILED";
    failure.qp = peer.qp->qp_num;
    failure.wr_id = wr_id;
    failure.vendor_err = static_cast<std::uint32_t>(error);
    failure.peer = peer.rank;
    failure.message = device_ + ": " + call + " for rank " + std::to_string(peer.rank) +
                      " failed: " + reason(error);
    fail(std::move(failure));
}

void VerbsNic::post_receives(Peer& peer, std::uint32_t count) {
    while (count > 0) {
        const std::uint32_t batch = std::min(count, kChain);
        for (std::uint32_t i = 0; i < batch; ++i) {
            ibv_recv_wr& wr = peer.receives[i];
            wr = {};
            wr.wr_id = make_wr_id(true, peer.rank, 0);
            wr.sg_list = receive_piece_;
            wr.num_sge = receive_piece_ != nullptr ? 1 : 0;
            wr.next = i + 1 < batch ? &peer.receives[i + 1] : nullptr;
        }
        ibv_recv_wr* bad = nullptr;
        const int error = ibv_post_recv(peer.qp.get(), peer.receives.data(), &bad);
        if (error != 0) return post_failed(peer, 0, error, "ibv_post_recv");
        count -= batch;
    }
}

void VerbsNic::report(const ibv_wc& wc) {
    Failure failure;
    failure.status = status_name(wc.status);
    failure.qp = wc.qp_num;
    failure.wr_id = wc.wr_id;
    failure.vendor_err = wc.vendor_err;
    failure.peer = wr_peer(wc.wr_id);
    failure.message = device_ + ": " + ((wc.wr_id & kReceiveBit) != 0 ? "receive from" : "put to") +
                      " rank " + std::to_string(failure.peer) + " completed with " +
                      failure.status + " (QP " + std::to_string(wc.qp_num) + ", wr_id " +
                      std::to_string(wc.wr_id) + ", vendor code " + std::to_string(wc.vendor_err) +
                      ")";
    fail(std::move(failure));
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
    Peer& peer = *peers_[wr_peer(wc.wr_id)];
    if ((wc.wr_id & kReceiveBit) == 0) {
        sent(peer, peer.posted - ((peer.posted - wc.wr_id) & kNumberMask));
        return;
    }
    ++peer.owed;
    if (!peer.listed_owing) {
        peer.listed_owing = true;
        owing_.push_back(&peer);
    }
    if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) arrived(peer, wc, sink);
}

void VerbsNic::bad_signal(const ibv_wc& wc, std::uint32_t rank, std::uint32_t signal) {
    Failure failure;
    failure.status = "INVALID_PUT";
    failure.qp = wc.qp_num;
    failure.wr_id = wc.wr_id;
    failure.peer = rank;
    failure.message = "rank " + std::to_string(rank) + " raised signal " + std::to_string(signal) +
                      ", which this rank's signal pad does not have";
    fail(std::move(failure));
}

int VerbsNic::poll(SignalSink& sink) {
    if (failed()) return 0;
    int total = 0;
    std::array<ibv_wc, 32> wcs;
    for (const auto& queue : queues_) {
        const int count = ibv_poll_cq(queue.get(), static_cast<int>(wcs.size()), wcs.data());
        if (count < 0) {
            Failure failure;
            failure.status = "CQ_ERR";
            failure.message = device_ + ": ibv_poll_cq failed (" + std::to_string(count) + ")";
            fail(std::move(failure));
            return 0;
        }
        for (int i = 0; i < count && !failed(); ++i)
            complete(wcs[static_cast<std::size_t>(i)], sink);
        total += count;
    }
    if (flushed_ && !failed()) {
        read_events();
        if (total == 0 && !failed()) report(*flushed_);  // nothing else came: it is the first error
        return 1;
    }
    for (Peer* peer : owing_) {
        post_receives(*peer, peer->owed);
        peer->owed = 0;
        peer->listed_owing = false;
    }
    owing_.clear();
    if (++polls_ % kAsyncEvery == 0) read_events();
    return total;
}

void VerbsNic::mark() {
    for (const auto& peer : peers_) {
        if (peer) peer->marked = peer->posted;
    }
}

bool VerbsNic::reached_mark() const {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return !peer || peer->completed >= peer->marked; });
}

void VerbsNic::arm() {
    for (const auto& queue : queues_) ibv_req_notify_cq(queue.get(), 0);
}

void VerbsNic::settle() {
    ibv_cq* queue = nullptr;
    void* tag = nullptr;
    while (verbs_->get_cq_event(channel_.get(), &queue, &tag) == 0) verbs_->ack_cq_events(queue, 1);
    read_events();
}

// The one reader of the context's events. What breaks the NIC becomes its failure; the rest is
// dropped.
void VerbsNic::read_events() {
    ibv_async_event event{};
    while (verbs_->get_async_event(context_.get(), &event) == 0) {
        Failure failure;
        bool fatal = true;
        switch (event.event_type) {
            case IBV_EVENT_QP_FATAL:
            case IBV_EVENT_QP_REQ_ERR:
            case IBV_EVENT_QP_ACCESS_ERR:
                for (const auto& peer : peers_) {
                    if (peer && peer->qp.get() == event.element.qp) {
                        failure.peer = peer->rank;
                        failure.qp = peer->qp->qp_num;
                    }
                }
                break;
            case IBV_EVENT_CQ_ERR:
            case IBV_EVENT_DEVICE_FATAL:
            case IBV_EVENT_PORT_ERR:
            case IBV_EVENT_WQ_FATAL:
                break;
            default:
                fatal = false;
        }
        failure.status = event_name(event.event_type);
        verbs_->ack_async_event(&event);
        if (!fatal) continue;
        failure.message =
            device_ + ": asynchronous event " + failure.status +
            (failure.peer >= 0 ? " on the queue pair of rank " + std::to_string(failure.peer)
                               : std::string());
        fail(std::move(failure));
    }
}

}  // namespace mkernel::nics::verbs
