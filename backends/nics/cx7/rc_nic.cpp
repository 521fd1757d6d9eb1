#include "backends/nics/cx7/rc_nic.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <random>

namespace mkernel::nics::cx7 {
namespace {

using verbs::reason;

constexpr std::uint32_t kInline = 64;  // bytes that may lie in a request itself

ibv_mtu mtu_code(std::uint32_t bytes) {
    int code = IBV_MTU_256;
    while (code < IBV_MTU_4096 && (256u << code) <= bytes) ++code;
    return static_cast<ibv_mtu>(code);
}

}  // namespace

struct RcNic::RcLane : Lane {
    std::uint32_t psn = 0;
    std::uint32_t mtu = 0;
    std::uint32_t chain = 0;  // requests staged
    std::array<ibv_send_wr, kChain> requests{};
    std::array<ibv_sge, kChain> pieces{};
};

RcNic::RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::vector<verbs::PortName>& ports,
             const verbs::Options& options)
    : VerbsNic(std::move(verbs), ports, options, {.in_order = true, .receives_have_sge = false}) {
    max_inline_ = kInline;
    chain_limit_ = std::clamp(depth_ / 4, 1u, kChain);
}

std::unique_ptr<RcNic::Lane> RcNic::new_lane() {
    return std::make_unique<RcLane>();
}

void RcNic::open(Lane& each, Endpoint& mine) {
    auto& lane = static_cast<RcLane&>(each);
    const verbs::Rail& rail = rail_of(lane);
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = lane.queue.get();
    init.recv_cq = lane.queue.get();
    init.cap.max_send_wr = depth_;
    init.cap.max_recv_wr = receives_;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.cap.max_inline_data = max_inline_;
    ibv_qp* qp = verbs_->create_qp(rail.pd.get(), &init);
    if (qp == nullptr) {
        init.cap.max_inline_data = 0;
        qp = verbs_->create_qp(rail.pd.get(), &init);
    }
    lane.qp = rail.own(qp, lane.queue, lane.rank);
    max_inline_ = std::min(max_inline_, init.cap.max_inline_data);

    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.pkey_index = 0;
    attr.port_num = rail.port_number;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    const int error = verbs_->modify_qp(
        qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error != 0) throw SetupError(rail.name + ": QP to INIT failed: " + reason(error));
    lane.mtu = mine.mtu;
    lane.psn = mine.psn = std::random_device{}() & 0xffffff;
}

void RcNic::join(Lane& each, const Endpoint& remote) {
    const auto& lane = static_cast<RcLane&>(each);
    const verbs::Rail& rail = rail_of(lane);
    const std::string peer = std::to_string(lane.rank);
    const ::ibv_gid gid = rail.remote_gid(lane.rank, remote);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = mtu_code(std::min(lane.mtu, remote.mtu));
    attr.dest_qp_num = remote.qp_num;
    attr.rq_psn = remote.psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = kRnrTimer;
    attr.ah_attr.port_num = rail.port_number;
    attr.ah_attr.dlid = static_cast<std::uint16_t>(remote.lid);
    attr.ah_attr.sl = options_.service_level;
    if (remote.ethernet || remote.lid == 0) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = gid;
        attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(rail.gid.index);
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.traffic_class = options_.traffic_class;
    }
    int error =
        verbs_->modify_qp(lane.qp.get(), &attr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) {
        throw SetupError(rail.name + ": QP to RTR for peer " + peer + " at GID " + remote.gid +
                         " failed: " + reason(error) +
                         "; is the peer alive, and is gid_index right on both sides?");
    }
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = options_.qp_timeout;
    attr.retry_cnt = options_.retry_count;
    attr.rnr_retry = options_.rnr_retry;
    attr.sq_psn = lane.psn;
    attr.max_rd_atomic = 1;
    error = verbs_->modify_qp(lane.qp.get(), &attr,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (error != 0) {
        throw SetupError(rail.name + ": QP to RTS for peer " + peer + " failed: " + reason(error));
    }
}

// Stages a write. Chains are short enough that the NIC always has something to do.
bool RcNic::stage(Lane& each, const Write& write) {
    auto& lane = static_cast<RcLane&>(each);
    list_ready(lane);
    ibv_send_wr& slot = lane.requests[lane.chain];
    lane.pieces[lane.chain] = write.source;
    slot.next = nullptr;
    slot.wr_id = verbs::make_wr_id(false, lane.rank, lane.number, ++lane.posted);
    slot.sg_list = &lane.pieces[lane.chain];
    slot.num_sge = write.source.length != 0 ? 1 : 0;
    slot.opcode = write.told ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    slot.send_flags = !write.device && write.source.length <= max_inline_ ? IBV_SEND_INLINE : 0;
    slot.imm_data = htonl(write.immediate);
    slot.wr.rdma.remote_addr = write.remote_addr;
    slot.wr.rdma.rkey = write.rkey;
    if (lane.chain > 0) lane.requests[lane.chain - 1].next = &slot;
    if (++lane.chain >= chain_limit_) hand_over(lane);
    return !failed();
}

bool RcNic::hand_over(Lane& each) {
    auto& lane = static_cast<RcLane&>(each);
    if (lane.chain == 0) return true;
    lane.requests[lane.chain - 1].send_flags |= IBV_SEND_SIGNALED;
    lane.chain = 0;
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(lane.qp.get(), lane.requests.data(), &bad);
    if (error != 0) post_failed(lane, bad != nullptr ? bad->wr_id : 0, error, "ibv_post_send");
    return true;
}

// Notes a completion. Each chain ends in a signaled request, and RC completes them in order.
void RcNic::sent(Lane& lane, std::uint64_t number) {
    lane.completed = lane.ended = number;
}

}  // namespace mkernel::nics::cx7
