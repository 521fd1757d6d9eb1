#include "backends/nics/cx7/rc_nic.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "backends/nics/cx7/immediate.hpp"
#include "backends/nics/verbs/devices.hpp"

namespace mkernel::nics::cx7 {
namespace {

constexpr std::uint64_t kReceiveBit = std::uint64_t{1} << 63;
constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << 40) - 1;
constexpr std::uint32_t kAsyncEvery = 1024;  // polls between looks at the event descriptor

std::uint64_t make_wr_id(bool receive, std::uint32_t peer, std::uint64_t number) {
    return (receive ? kReceiveBit : 0) | (std::uint64_t{peer} << 40) | (number & kNumberMask);
}
std::uint32_t wr_peer(std::uint64_t wr_id) {
    return static_cast<std::uint32_t>((wr_id & ~kReceiveBit) >> 40);
}

std::uint32_t mtu_bytes(ibv_mtu mtu) {
    return 128u << static_cast<unsigned>(mtu);
}
ibv_mtu mtu_code(std::uint32_t bytes) {
    int code = IBV_MTU_256;
    while (code < IBV_MTU_4096 && (256u << code) <= bytes) ++code;
    return static_cast<ibv_mtu>(code);
}

std::string reason(int error) {
    return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

void set_nonblocking(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

struct RcNic::Peer {
    struct RemoteRegion {
        RemoteKey key;
        std::atomic<bool> bound{false};
    };

    std::uint32_t rank = 0;
    std::shared_ptr<ibv_qp> qp;
    std::shared_ptr<ibv_cq> queue;
    bool connected = false;
    std::uint64_t posted = 0;     // requests staged or posted, ever
    std::uint64_t completed = 0;  // requests known complete
    std::uint64_t marked = 0;
    std::uint32_t psn = 0;
    std::uint32_t chain = 0;  // requests staged
    bool listed_ready = false;
    std::array<ibv_send_wr, kChain> requests{};
    std::array<ibv_sge, kChain> pieces{};
    std::uint32_t owed = 0;  // receives used and not posted again
    bool listed_owing = false;
    std::array<ibv_recv_wr, kChain> receives{};
    std::unique_ptr<RemoteRegion[]> regions{new RemoteRegion[kMaxRegions]};
};

RcNic::RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& device,
             const Options& options)
    : verbs_(std::move(verbs)),
      device_(device),
      options_(options),
      context_(verbs::open_device(verbs_, device)),
      regions_(new LocalRegion[kMaxRegions]) {
    if (int error = verbs_->query_device(context_.get(), &limits_); error != 0) {
        throw SetupError(device + ": ibv_query_device failed: " + reason(error));
    }
    if (int error = verbs_->query_port(context_.get(), options_.port, &port_); error != 0) {
        throw SetupError(device + ": ibv_query_port(" + std::to_string(options_.port) +
                         ") failed: " + reason(error));
    }
    if (port_.state != IBV_PORT_ACTIVE) {
        throw SetupError(device + " port " + std::to_string(options_.port) +
                         " is not active (state " + std::to_string(port_.state) +
                         "); bring its link up");
    }
    const auto gid =
        verbs::choose_gid(*verbs_, context_.get(), options_.port, port_, options_.gid_index);
    gid_ = gid.gid;
    gid_index_ = gid.index;
    const auto most = static_cast<std::uint32_t>(std::max(limits_.max_qp_wr, 4));
    options_.queue_depth = std::min(options_.queue_depth, most);
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

RcNic::~RcNic() {
    close();
}

void RcNic::close() {
    peers_.clear();
    ready_.clear();
    owing_.clear();
    queues_.clear();
    regions_.reset();
    channel_.reset();
    pd_.reset();
    context_.reset();
}

Capabilities RcNic::capabilities() const {
    Capabilities c;
    c.ordered = true;
    c.max_message_bytes = port_.max_msg_sz;
    c.max_inline_bytes = max_inline_;
    c.immediate_data = true;
    c.max_sge = static_cast<std::uint32_t>(std::max(limits_.max_sge, 0));
    c.atomics = limits_.atomic_cap != IBV_ATOMIC_NONE;
    c.dmabuf = false;
    c.max_signal = kMaxSignal;
    c.max_value = kMaxValue;
    return c;
}

// Completion queues are shared by a group of QPs, sized so that they can never overflow.
std::shared_ptr<ibv_cq> RcNic::queue_for_next_peer() {
    const std::uint32_t each = options_.queue_depth + receives_;
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

Endpoint RcNic::add_peer(std::uint32_t rank) {
    if (rank >= kMaxPeers) {
        throw SetupError("peer " + std::to_string(rank) + " is out of range; at most " +
                         std::to_string(kMaxPeers) + " ranks");
    }
    if (rank >= peers_.size()) peers_.resize(rank + 1);
    if (peers_[rank]) {
        throw SetupError("peer " + std::to_string(rank) + " already has a queue pair");
    }
    auto peer = std::make_unique<Peer>();
    peer->rank = rank;
    peer->queue = queue_for_next_peer();

    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = peer->queue.get();
    init.recv_cq = peer->queue.get();
    init.cap.max_send_wr = options_.queue_depth;
    init.cap.max_recv_wr = receives_;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = 64;
    ibv_qp* qp = verbs_->create_qp(pd_.get(), &init);
    if (qp == nullptr) {
        init.cap.max_inline_data = 0;
        qp = verbs_->create_qp(pd_.get(), &init);
    }
    if (qp == nullptr) {
        throw SetupError(device_ + ": ibv_create_qp for peer " + std::to_string(rank) +
                         " failed: " + reason(errno) +
                         "; lower queue_depth or raise the limit of locked memory");
    }
    peer->qp = {qp, [v = verbs_, c = context_, p = pd_, q = peer->queue](ibv_qp* each) {
                    v->destroy_qp(each);
                }};
    max_inline_ = init.cap.max_inline_data;

    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.pkey_index = 0;
    attr.port_num = options_.port;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    const int error = verbs_->modify_qp(
        qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0) throw SetupError(device_ + ": QP to INIT failed: " + reason(error));
    post_receives(*peer, receives_);
    if (failed()) throw SetupError(device_ + ": " + failure()->message);

    Endpoint mine;
    mine.qp_num = qp->qp_num;
    mine.psn = std::random_device{}() & 0xffffff;
    mine.lid = port_.lid;
    mine.mtu = mtu_bytes(port_.active_mtu);
    mine.gid = verbs::gid_text(gid_);
    mine.ethernet = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
    peer->psn = mine.psn;
    peers_[rank] = std::move(peer);
    ++peer_count_;
    ready_.reserve(peer_count_);
    owing_.reserve(peer_count_);
    return mine;
}

RcNic::Peer& RcNic::peer_at(std::uint32_t rank, const char* what) {
    if (rank >= peers_.size() || !peers_[rank]) {
        throw SetupError(std::string(what) + ": peer " + std::to_string(rank) +
                         " has no queue pair; call address(peer) first");
    }
    return *peers_[rank];
}

void RcNic::connect(std::uint32_t rank, const Endpoint& remote) {
    Peer& peer = peer_at(rank, "connect");
    const bool ethernet = port_.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (ethernet != remote.ethernet) {
        throw SetupError("peer " + std::to_string(rank) + " is on " +
                         (remote.ethernet ? "Ethernet" : "InfiniBand") + ", " + device_ + " on " +
                         (ethernet ? "Ethernet" : "InfiniBand") +
                         "; choose devices of one link layer");
    }
    const auto gid = verbs::parse_gid(remote.gid);
    if (!gid) {
        throw SetupError("peer " + std::to_string(rank) + " sent the GID '" + remote.gid +
                         "'; expected 32 hexadecimal digits");
    }
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = mtu_code(std::min(mtu_bytes(port_.active_mtu), remote.mtu));
    attr.dest_qp_num = remote.qp_num;
    attr.rq_psn = remote.psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = kRnrTimer;
    attr.ah_attr.port_num = options_.port;
    attr.ah_attr.dlid = static_cast<std::uint16_t>(remote.lid);
    if (ethernet || remote.lid == 0) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = *gid;
        attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
        attr.ah_attr.grh.hop_limit = 64;
    }
    int error =
        verbs_->modify_qp(peer.qp.get(), &attr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) {
        throw SetupError(device_ + ": QP to RTR for peer " + std::to_string(rank) + " at GID " +
                         remote.gid + " failed: " + reason(error) +
                         "; is the peer alive, and is gid_index right on both sides?");
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = options_.qp_timeout;
    attr.retry_cnt = options_.retry_count;
    attr.rnr_retry = options_.rnr_retry;
    attr.sq_psn = peer.psn;
    attr.max_rd_atomic = 1;
    error = verbs_->modify_qp(peer.qp.get(), &attr,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (error != 0) {
        throw SetupError(device_ + ": QP to RTS for peer " + std::to_string(rank) +
                         " failed: " + reason(error));
    }
    peer.connected = true;
}

RemoteKey RcNic::register_memory(std::uint32_t region, std::uint64_t address, std::uint64_t bytes) {
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

void RcNic::bind(std::uint32_t region, std::uint32_t rank, const RemoteKey& key) {
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

void RcNic::inject_failure(std::uint32_t rank) {
    Peer& peer = peer_at(rank, "inject_failure");
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    const int error = verbs_->modify_qp(peer.qp.get(), &attr, IBV_QP_STATE);
    if (error != 0) throw SetupError(device_ + ": QP to ERR failed: " + reason(error));
}

std::uint32_t RcNic::free_slots(const Peer& peer) const {
    return options_.queue_depth - static_cast<std::uint32_t>(peer.posted - peer.completed);
}

void RcNic::reject(const PutCommand& c, const std::string& why) {
    Failure failure;
    failure.status = "INVALID_PUT";
    failure.peer = c.peer;
    failure.message = "put of " + std::to_string(c.bytes) + " bytes of region " +
                      std::to_string(c.region) + " to rank " + std::to_string(c.peer) + ": " + why;
    fail(std::move(failure));
}

bool RcNic::check(const PutCommand& c) {
    if (c.peer >= peers_.size() || !peers_[c.peer] || !peers_[c.peer]->connected) {
        reject(c, "not a connected peer; the route should not lead through this NIC");
        return false;
    }
    if (c.signal != PutCommand::kNoSignal && (c.signal > kMaxSignal || c.value > kMaxValue)) {
        reject(c, "signal " + std::to_string(c.signal) + " with value " + std::to_string(c.value) +
                      "; signals up to " + std::to_string(kMaxSignal) + " and values up to " +
                      std::to_string(kMaxValue) + " fit the immediate");
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

void RcNic::stage(Peer& peer, const ibv_send_wr& wr, const ibv_sge& sge) {
    if (!peer.listed_ready) {
        peer.listed_ready = true;
        ready_.push_back(&peer);
    }
    ibv_send_wr& slot = peer.requests[peer.chain];
    peer.pieces[peer.chain] = sge;
    slot = wr;
    slot.sg_list = &peer.pieces[peer.chain];
    slot.num_sge = sge.length != 0 ? 1 : 0;
    slot.wr_id = make_wr_id(false, peer.rank, ++peer.posted);
    slot.next = nullptr;
    if (peer.chain > 0) peer.requests[peer.chain - 1].next = &slot;
    ++peer.chain;
}

void RcNic::flush_chain(Peer& peer) {
    if (peer.chain == 0) return;
    peer.requests[peer.chain - 1].send_flags |= IBV_SEND_SIGNALED;
    peer.chain = 0;
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(peer.qp.get(), peer.requests.data(), &bad);
    if (error != 0) {
        Failure failure;
        failure.status = "POST_FAILED";
        failure.qp = peer.qp->qp_num;
        failure.wr_id = bad != nullptr ? bad->wr_id : 0;
        failure.vendor_err = static_cast<std::uint32_t>(error);
        failure.peer = peer.rank;
        failure.message = device_ + ": ibv_post_send to rank " + std::to_string(peer.rank) +
                          " failed: " + reason(error);
        fail(std::move(failure));
    }
}

PutResult RcNic::put(const PutCommand& c, PutCursor& cursor) {
    if (failed()) return PutResult::failed;
    if (!cursor.begun) {
        if (!check(c)) return PutResult::failed;
        cursor.begun = true;
    }
    Peer& peer = *peers_[c.peer];
    const std::uint32_t chain_limit = std::clamp(options_.queue_depth / 4, 1u, kChain);
    const std::uint32_t value = c.signal == PutCommand::kNoSignal ? 0 : c.value;
    while (cursor.bytes < c.bytes || cursor.value < value) {
        if (free_slots(peer) == 0) return PutResult::busy;
        ibv_send_wr wr{};
        ibv_sge sge{};
        const std::uint64_t length =
            std::min<std::uint64_t>(c.bytes - cursor.bytes, port_.max_msg_sz);
        if (length != 0) {
            const RemoteKey& there = peer.regions[c.region].key;
            sge.addr = regions_[c.region].address + c.local_offset + cursor.bytes;
            sge.length = static_cast<std::uint32_t>(length);
            sge.lkey = regions_[c.region].lkey;
            wr.wr.rdma.remote_addr = there.address + c.remote_offset + cursor.bytes;
            wr.wr.rdma.rkey = there.rkey;
            if (length <= max_inline_) wr.send_flags |= IBV_SEND_INLINE;
            cursor.bytes += length;
        }
        if (cursor.bytes == c.bytes && cursor.value < value) {
            const std::uint32_t step = std::min(value - cursor.value, kMaxStep);
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.imm_data = htonl(pack_immediate(c.signal, step));
            cursor.value += step;
        } else {
            wr.opcode = IBV_WR_RDMA_WRITE;
        }
        stage(peer, wr, sge);
        if (peer.chain >= chain_limit) {
            flush_chain(peer);
            if (failed()) return PutResult::failed;
        }
    }
    return PutResult::done;
}

void RcNic::ring() {
    for (Peer* peer : ready_) {
        peer->listed_ready = false;
        flush_chain(*peer);
    }
    ready_.clear();
}

void RcNic::post_receives(Peer& peer, std::uint32_t count) {
    while (count > 0) {
        const std::uint32_t batch = std::min(count, kChain);
        for (std::uint32_t i = 0; i < batch; ++i) {
            ibv_recv_wr& wr = peer.receives[i];
            wr = {};
            wr.wr_id = make_wr_id(true, peer.rank, 0);
            wr.next = i + 1 < batch ? &peer.receives[i + 1] : nullptr;
        }
        ibv_recv_wr* bad = nullptr;
        const int error = ibv_post_recv(peer.qp.get(), peer.receives.data(), &bad);
        if (error != 0) {
            Failure failure;
            failure.status = "POST_FAILED";
            failure.qp = peer.qp->qp_num;
            failure.vendor_err = static_cast<std::uint32_t>(error);
            failure.peer = peer.rank;
            failure.message = device_ + ": ibv_post_recv for rank " + std::to_string(peer.rank) +
                              " failed: " + reason(error);
            fail(std::move(failure));
            return;
        }
        count -= batch;
    }
}

void RcNic::report(const ibv_wc& wc) {
    Failure failure;
    failure.status = verbs::status_name(wc.status);
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

void RcNic::complete(const ibv_wc& wc, SignalSink& sink) {
    if (wc.status != IBV_WC_SUCCESS) {
        // A flush is a consequence: its cause may lie in the events or further back in a queue.
        if (wc.status == IBV_WC_WR_FLUSH_ERR) {
            if (!flushed_) flushed_ = wc;
        } else {
            report(wc);
        }
        return;
    }
    const std::uint32_t rank = wr_peer(wc.wr_id);
    Peer& peer = *peers_[rank];
    if ((wc.wr_id & kReceiveBit) == 0) {
        peer.completed = peer.posted - ((peer.posted - wc.wr_id) & kNumberMask);
        return;
    }
    ++peer.owed;
    if (!peer.listed_owing) {
        peer.listed_owing = true;
        owing_.push_back(&peer);
    }
    if ((wc.wc_flags & IBV_WC_WITH_IMM) == 0) return;
    const std::uint32_t immediate = ntohl(wc.imm_data);
    const std::uint32_t signal = immediate_signal(immediate);
    if (!sink.raise(rank, signal, immediate_step(immediate))) {
        Failure failure;
        failure.status = "INVALID_PUT";
        failure.qp = wc.qp_num;
        failure.wr_id = wc.wr_id;
        failure.peer = rank;
        failure.message = "rank " + std::to_string(rank) + " raised signal " +
                          std::to_string(signal) + ", which this rank's signal pad does not have";
        fail(std::move(failure));
    }
}

int RcNic::poll(SignalSink& sink) {
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

void RcNic::mark() {
    for (const auto& peer : peers_) {
        if (peer) peer->marked = peer->posted;
    }
}

bool RcNic::reached_mark() const {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return !peer || peer->completed >= peer->marked; });
}

void RcNic::arm() {
    for (const auto& queue : queues_) ibv_req_notify_cq(queue.get(), 0);
}

void RcNic::settle() {
    ibv_cq* queue = nullptr;
    void* tag = nullptr;
    while (verbs_->get_cq_event(channel_.get(), &queue, &tag) == 0) verbs_->ack_cq_events(queue, 1);
    read_events();
}

// The one reader of the context's events. What breaks the NIC becomes its failure; the rest is
// dropped.
void RcNic::read_events() {
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
        failure.status = verbs::event_name(event.event_type);
        verbs_->ack_async_event(&event);
        if (!fatal) continue;
        failure.message =
            device_ + ": asynchronous event " + failure.status +
            (failure.peer >= 0 ? " on the queue pair of rank " + std::to_string(failure.peer)
                               : std::string());
        fail(std::move(failure));
    }
}

}  // namespace mkernel::nics::cx7
