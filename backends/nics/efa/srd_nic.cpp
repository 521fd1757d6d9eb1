#include "backends/nics/efa/srd_nic.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <random>
#include <vector>

#include "backends/nics/efa/immediate.hpp"

namespace mkernel::nics::efa {
namespace {

using verbs::make_wr_id;
using verbs::reason;

}  // namespace

struct SrdNic::SrdPeer : Peer {
    struct Group {
        std::uint32_t parts = 0;  // wanted; 0: not known
        std::uint32_t seen = 0;
        std::optional<std::uint32_t> signal, value;
    };

    ibv_qp_ex* extended = nullptr;
    std::shared_ptr<ibv_ah> handle;
    std::uint32_t remote_qpn = 0;
    std::uint32_t remote_key = 0;
    std::uint32_t queue_key = 0;
    std::array<Write, kChain> writes;
    std::uint32_t chain = 0;         // requests staged
    std::vector<std::uint8_t> done;  // by number modulo depth: complete, but an older one is not
    std::uint32_t group = 0;         // of the put in progress, where it is a group
    bool open = false;               // such a put is in progress
    std::uint64_t groups_begun = 0;
    std::array<std::uint64_t, kGroups> last_of{};  // number of the last request of each group
    std::array<Group, kGroups> arriving{};
};

SrdNic::SrdNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& library,
               const std::string& device, const verbs::DeviceOptions& options)
    : VerbsNic(std::move(verbs), device, options),
      efa_(verbs::Efadv::load(*verbs_, library)),
      rnr_retry_(options.rnr_retry) {
    const int error = efa_->query_device(context_.get(), &attributes_, sizeof(attributes_));
    if (error != 0) {
        throw SetupError(device_ + ": efadv_query_device failed: " + reason(error) +
                         "; it is not an EFA device");
    }
    if ((attributes_.device_caps & verbs::kEfaRdmaWrite) == 0) {
        throw SetupError(device_ +
                         " has no RDMA write, which `efa` needs: its device capabilities are " +
                         std::to_string(attributes_.device_caps) +
                         "; use an instance type whose EFA has it, and rdma-core 46 or later");
    }
    max_rdma_ = attributes_.max_rdma_size;
    depth_ = std::min(depth_, attributes_.max_sq_wr);
    receives_ = std::min(receives_, attributes_.max_rq_wr);
    ibv_mr* mr =
        verbs_->reg_mr(pd_.get(), landing_.data(), sizeof(landing_), IBV_ACCESS_LOCAL_WRITE);
    if (mr == nullptr) {
        throw SetupError(device_ + ": ibv_reg_mr of the receives' buffer failed: " + reason(errno));
    }
    landing_mr_ = {mr, [v = verbs_, c = context_, p = pd_](ibv_mr* each) { v->dereg_mr(each); }};
    landing_piece_ = {reinterpret_cast<std::uint64_t>(landing_.data()), 8, mr->lkey};
    receive_piece_ = &landing_piece_;
}

SrdNic::~SrdNic() {
    close();
}

void SrdNic::close() {
    peers_.clear();
    landing_mr_.reset();
    VerbsNic::close();
}

Capabilities SrdNic::capabilities() const {
    Capabilities c;
    c.ordered = false;
    c.max_message_bytes = max_rdma_;
    c.max_inline_bytes = 0;
    c.immediate_data = true;
    c.max_sge = 1;
    c.max_signal = kMaxSignal;
    c.max_value = kMaxValue;
    return c;
}

Endpoint SrdNic::add_peer(std::uint32_t rank) {
    auto peer = std::make_unique<SrdPeer>();
    prepare(*peer, rank);
    peer->done.resize(depth_);

    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_DRIVER;
    init.send_cq = init.recv_cq = peer->queue.get();
    init.pd = pd_.get();
    init.cap.max_send_wr = depth_;
    init.cap.max_recv_wr = receives_;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.sq_sig_all = 1;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    efadv_qp_init_attr srd{};
    srd.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    own(*peer, efa_->create_qp_ex(context_.get(), &init, &srd, sizeof(srd)));
    peer->extended = efa_->qp_to_qp_ex(peer->qp.get());

    peer->queue_key = std::random_device{}() & 0xffffff;
    const auto to = [&](ibv_qp_state state, int mask) {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        attr.port_num = port_number_;
        attr.qkey = peer->queue_key;
        attr.rnr_retry = rnr_retry_;
        const int error = verbs_->modify_qp(peer->qp.get(), &attr, IBV_QP_STATE | mask);
        if (error != 0) {
            throw SetupError(device_ + ": SRD QP to state " + std::to_string(state) +
                             " failed: " + reason(error));
        }
    };
    const bool bounded = (attributes_.device_caps & verbs::kEfaRnrRetry) != 0;
    to(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    to(IBV_QPS_RTR, 0);
    to(IBV_QPS_RTS, IBV_QP_SQ_PSN | (bounded ? IBV_QP_RNR_RETRY : 0));

    Endpoint mine = endpoint_of(*peer);
    mine.psn = peer->queue_key;
    adopt(std::move(peer));
    return mine;
}

void SrdNic::connect(std::uint32_t rank, const Endpoint& remote) {
    auto& peer = static_cast<SrdPeer&>(peer_at(rank, "connect"));
    ibv_ah_attr attr{};
    attr.is_global = 1;
    attr.port_num = port_number_;
    attr.grh.dgid = remote_gid(rank, remote);
    attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
    ibv_ah* ah = efa_->create_ah(pd_.get(), &attr);
    if (ah == nullptr) {
        throw SetupError(device_ + ": no address handle for peer " + std::to_string(rank) +
                         " at GID " + remote.gid + ": " + reason(errno));
    }
    peer.handle = {ah, [e = efa_, c = context_, p = pd_](ibv_ah* each) { e->destroy_ah(each); }};
    peer.remote_qpn = remote.qp_num;
    peer.remote_key = remote.psn;
    peer.connected = true;
}

// False where the chain is full and the provider's queue too.
bool SrdNic::stage(SrdPeer& peer, Write write) {
    if (peer.chain == kChain && !hand_over(peer)) return false;
    list_ready(peer);
    write.wr_id = make_wr_id(false, peer.rank, ++peer.posted);
    peer.writes[peer.chain++] = write;
    return true;
}

bool SrdNic::hand_over(Peer& each) {
    auto& peer = static_cast<SrdPeer&>(each);
    if (peer.chain == 0) return true;
    ibv_qp_ex* qp = peer.extended;
    ibv_wr_start(qp);
    for (std::uint32_t i = 0; i < peer.chain; ++i) {
        const Write& write = peer.writes[i];
        qp->wr_id = write.wr_id;
        qp->wr_flags = IBV_SEND_SIGNALED;
        if (write.told) {
            ibv_wr_rdma_write_imm(qp, write.rkey, write.remote_addr, htonl(write.immediate));
        } else {
            ibv_wr_rdma_write(qp, write.rkey, write.remote_addr);
        }
        ibv_wr_set_sge(qp, write.source.lkey, write.source.addr, write.source.length);
        ibv_wr_set_ud_addr(qp, peer.handle.get(), peer.remote_qpn, peer.remote_key);
    }
    const int error = ibv_wr_complete(qp);
    if (error == ENOMEM) return false;  // nothing of it was posted
    if (error != 0) post_failed(peer, peer.writes[0].wr_id, error, "ibv_wr_complete");
    peer.chain = 0;
    return true;
}

PutResult SrdNic::put(const PutCommand& c, PutCursor& cursor) {
    if (failed()) return PutResult::failed;
    if (!cursor.begun) {
        if (!check(c, kMaxSignal, kMaxValue)) return PutResult::failed;
        cursor.begun = true;
    }
    auto& peer = static_cast<SrdPeer&>(*peers_[c.peer]);
    const bool raises = c.signal != PutCommand::kNoSignal && c.value != 0;
    const std::uint64_t parts = (c.bytes + max_rdma_ - 1) / max_rdma_;
    const bool group = raises && parts > 1;
    if (group && !peer.open) {
        const auto next = static_cast<std::uint32_t>(peer.groups_begun % kGroups);
        if (peer.completed < peer.last_of[next]) return PutResult::busy;
        peer.group = next;
        ++peer.groups_begun;
        peer.open = true;
    }
    // The messages without bytes: the signal alone, or a group's signal and value.
    const std::uint32_t closing = group ? 2 : raises && c.bytes == 0 ? 1 : 0;
    while (cursor.bytes < c.bytes || cursor.value < closing) {
        if (free_slots(peer) == 0) return PutResult::busy;
        Write write;
        write.source = {landing_piece_.addr, 0, landing_piece_.lkey};
        const std::uint64_t length = std::min(c.bytes - cursor.bytes, max_rdma_);
        write.told = raises;
        if (length != 0) {
            const RemoteKey& there = peer.regions[c.region].key;
            write.source = {regions_[c.region].address + c.local_offset + cursor.bytes,
                            static_cast<std::uint32_t>(length), regions_[c.region].lkey};
            write.remote_addr = there.address + c.remote_offset + cursor.bytes;
            write.rkey = there.rkey;
            write.immediate =
                group ? pack_group(Kind::part, peer.group, static_cast<std::uint32_t>(parts))
                      : pack_whole(c.signal, c.value);
        } else if (!group) {
            write.immediate = pack_whole(c.signal, c.value);
        } else if (cursor.value == 0) {
            write.immediate = pack_group(Kind::signal, peer.group, c.signal);
        } else {
            write.immediate = pack_group(Kind::value, peer.group, c.value);
        }
        if (!stage(peer, write)) return failed() ? PutResult::failed : PutResult::busy;
        cursor.bytes += length;
        if (length == 0) ++cursor.value;
    }
    if (group) {
        peer.last_of[peer.group] = peer.posted;
        peer.open = false;
    }
    return failed() ? PutResult::failed : PutResult::done;
}

// Requests complete in any order.
void SrdNic::sent(Peer& each, std::uint64_t number) {
    auto& peer = static_cast<SrdPeer&>(each);
    peer.done[number % depth_] = 1;
    while (peer.completed < peer.posted && peer.done[(peer.completed + 1) % depth_] != 0) {
        peer.done[++peer.completed % depth_] = 0;
    }
}

void SrdNic::arrived(Peer& each, const ibv_wc& wc, SignalSink& sink) {
    auto& peer = static_cast<SrdPeer&>(each);
    const std::uint32_t immediate = ntohl(wc.imm_data);
    std::uint32_t signal = payload_of(immediate);
    std::uint32_t value = value_of(immediate);
    if (is_group(immediate)) {
        auto& group = peer.arriving[group_of(immediate)];
        switch (kind_of(immediate)) {
            case Kind::part:
                group.parts = payload_of(immediate);
                ++group.seen;
                break;
            case Kind::signal:
                group.signal = payload_of(immediate);
                break;
            case Kind::value:
                group.value = payload_of(immediate);
                break;
        }
        if (group.seen == 0 || group.seen < group.parts || !group.signal || !group.value) return;
        signal = *group.signal;
        value = *group.value;
        group = {};
    }
    if (!sink.raise(peer.rank, signal, value)) bad_signal(wc, peer.rank, signal);
}

}  // namespace mkernel::nics::efa
