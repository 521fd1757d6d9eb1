#include "backends/nics/cx7/rc_nic.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "backends/nics/cx7/immediate.hpp"

namespace mkernel::nics::cx7 {
namespace {

using verbs::make_wr_id;
using verbs::reason;

ibv_mtu mtu_code(std::uint32_t bytes) {
    int code = IBV_MTU_256;
    while (code < IBV_MTU_4096 && (256u << code) <= bytes) ++code;
    return static_cast<ibv_mtu>(code);
}

}  // namespace

struct RcNic::RcPeer : Peer {
    std::uint32_t psn = 0;
    std::uint32_t chain = 0;  // requests staged
    std::array<ibv_send_wr, kChain> requests{};
    std::array<ibv_sge, kChain> pieces{};
};

RcNic::RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& device,
             const Options& options)
    : VerbsNic(std::move(verbs), device, options), options_(options) {}

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

Endpoint RcNic::add_peer(std::uint32_t rank) {
    auto peer = std::make_unique<RcPeer>();
    prepare(*peer, rank);

    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = peer->queue.get();
    init.recv_cq = peer->queue.get();
    init.cap.max_send_wr = depth_;
    init.cap.max_recv_wr = receives_;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = 64;
    ibv_qp* qp = verbs_->create_qp(pd_.get(), &init);
    if (qp == nullptr) {
        init.cap.max_inline_data = 0;
        qp = verbs_->create_qp(pd_.get(), &init);
    }
    own(*peer, qp);
    max_inline_ = init.cap.max_inline_data;

    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.pkey_index = 0;
    attr.port_num = options_.port;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    const int error = verbs_->modify_qp(
        qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0) throw SetupError(device_ + ": QP to INIT failed: " + reason(error));

    Endpoint mine = endpoint_of(*peer);
    mine.psn = std::random_device{}() & 0xffffff;
    peer->psn = mine.psn;
    adopt(std::move(peer));
    return mine;
}

void RcNic::connect(std::uint32_t rank, const Endpoint& remote) {
    auto& peer = static_cast<RcPeer&>(peer_at(rank, "connect"));
    const ::ibv_gid gid = remote_gid(rank, remote);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = mtu_code(std::min(endpoint_of(peer).mtu, remote.mtu));
    attr.dest_qp_num = remote.qp_num;
    attr.rq_psn = remote.psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = kRnrTimer;
    attr.ah_attr.port_num = options_.port;
    attr.ah_attr.dlid = static_cast<std::uint16_t>(remote.lid);
    if (remote.ethernet || remote.lid == 0) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = gid;
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

void RcNic::stage(RcPeer& peer, const ibv_send_wr& wr, const ibv_sge& sge) {
    list_ready(peer);
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

bool RcNic::hand_over(Peer& each) {
    auto& peer = static_cast<RcPeer&>(each);
    if (peer.chain == 0) return true;
    peer.requests[peer.chain - 1].send_flags |= IBV_SEND_SIGNALED;
    peer.chain = 0;
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(peer.qp.get(), peer.requests.data(), &bad);
    if (error != 0) post_failed(peer, bad != nullptr ? bad->wr_id : 0, error, "ibv_post_send");
    return true;
}

PutResult RcNic::put(const PutCommand& c, PutCursor& cursor) {
    if (failed()) return PutResult::failed;
    if (!cursor.begun) {
        if (!check(c, kMaxSignal, kMaxValue)) return PutResult::failed;
        cursor.begun = true;
    }
    auto& peer = static_cast<RcPeer&>(*peers_[c.peer]);
    const std::uint32_t chain_limit = std::clamp(depth_ / 4, 1u, kChain);
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
            hand_over(peer);
            if (failed()) return PutResult::failed;
        }
    }
    return PutResult::done;
}

// Each chain ends in a signaled request, and RC completes them in order.
void RcNic::sent(Peer& peer, std::uint64_t number) {
    peer.completed = number;
}

void RcNic::arrived(Peer& peer, const ibv_wc& wc, SignalSink& sink) {
    const std::uint32_t immediate = ntohl(wc.imm_data);
    const std::uint32_t signal = immediate_signal(immediate);
    if (!sink.raise(peer.rank, signal, immediate_step(immediate))) {
        bad_signal(wc, peer.rank, signal);
    }
}

}  // namespace mkernel::nics::cx7
