#include "backends/nics/efa/srd_nic.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <random>

namespace mkernel::nics::efa {
namespace {

using verbs::reason;

}  // namespace

struct SrdNic::Staged {
    Write write;
    std::uint64_t wr_id = 0;
};

struct SrdNic::SrdLane : Lane {
    std::shared_ptr<ibv_ah> handle;
    ibv_qp_ex* extended = nullptr;
    std::uint32_t remote_qpn = 0;
    std::uint32_t remote_key = 0;
    std::array<Staged, kChain> staged;
    std::uint32_t chain = 0;         // requests staged
    std::vector<std::uint8_t> done;  // by number modulo reach: complete, but an older one is not
};

efadv_device_attr query(const verbs::Efadv& efa, ibv_context* context, const std::string& device) {
    efadv_device_attr attributes{};
    const int error = efa.query_device(context, &attributes, sizeof(attributes));
    if (error != 0) {
        throw SetupError(device + ": efadv_query_device failed: " + reason(error) +
                         "; it is not an EFA device");
    }
    return attributes;
}

SrdNic::SrdNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& library,
               const std::vector<verbs::PortName>& ports, const verbs::Options& options)
    : VerbsNic(std::move(verbs), ports, options, {.in_order = false, .receives_have_sge = true}),
      efa_(*verbs_, library) {
    for (const auto& rail : rails_) {
        const efadv_device_attr device = query(efa_, rail->context.get(), rail->name);
        if ((device.device_caps & verbs::kEfaRdmaWrite) == 0) {
            throw SetupError(rail->name +
                             " has no RDMA write, which `efa` needs: its device capabilities are " +
                             std::to_string(device.device_caps) +
                             "; use an instance type whose EFA has it, and rdma-core 46 or later");
        }
        bounded_rnr_ = bounded_rnr_ && (device.device_caps & verbs::kEfaRnrRetry) != 0;
        max_message_ = rail->index == 0
                           ? device.max_rdma_size
                           : std::min<std::uint64_t>(max_message_, device.max_rdma_size);
        depth_ = std::min(depth_, device.max_sq_wr);
        receives_ = std::min(receives_, device.max_rq_wr);
    }
}

SrdNic::~SrdNic() {
    close();  // handles are destroyed through efa_
}

std::unique_ptr<SrdNic::Lane> SrdNic::new_lane() {
    return std::make_unique<SrdLane>();
}

void SrdNic::open(Lane& each, Endpoint& mine) {
    auto& lane = static_cast<SrdLane&>(each);
    const verbs::Rail& rail = rail_of(lane);
    lane.done.resize(reach());
    ibv_qp_init_attr_ex init{};
    init.qp_type = IBV_QPT_DRIVER;
    init.send_cq = init.recv_cq = lane.queue.get();
    init.pd = rail.pd.get();
    init.cap.max_send_wr = depth_;
    init.cap.max_recv_wr = receives_;
    init.cap.max_send_sge = 1;
    init.cap.max_recv_sge = 1;
    init.sq_sig_all = 1;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    efadv_qp_init_attr srd{};
    srd.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    lane.qp = rail.own(efa_.create_qp_ex(rail.context.get(), &init, &srd, sizeof(srd)), lane.queue,
                       lane.rank);
    lane.extended = efa_.qp_to_qp_ex(lane.qp.get());

    mine.psn = std::random_device{}() & 0xffffff;
    const auto to = [&](ibv_qp_state state, int mask) {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        attr.port_num = rail.port_number;
        attr.qkey = mine.psn;
        attr.rnr_retry = options_.rnr_retry;
        const int error = verbs_->modify_qp(lane.qp.get(), &attr, IBV_QP_STATE | mask);
        if (error != 0) {
            throw SetupError(rail.name + ": SRD QP to state " + std::to_string(state) +
                             " failed: " + reason(error));
        }
    };
    to(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    to(IBV_QPS_RTR, 0);
    to(IBV_QPS_RTS, IBV_QP_SQ_PSN | (bounded_rnr_ ? IBV_QP_RNR_RETRY : 0));
}

void SrdNic::join(Lane& each, const Endpoint& remote) {
    auto& lane = static_cast<SrdLane&>(each);
    const verbs::Rail& rail = rail_of(lane);
    ibv_ah_attr attr{};
    attr.is_global = 1;
    attr.port_num = rail.port_number;
    attr.grh.dgid = rail.remote_gid(lane.rank, remote);
    attr.grh.sgid_index = static_cast<std::uint8_t>(rail.gid.index);
    ibv_ah* ah = efa_.create_ah(rail.pd.get(), &attr);
    if (ah == nullptr) {
        throw SetupError(rail.name + ": no address handle for peer " + std::to_string(lane.rank) +
                         " at GID " + remote.gid + ": " + reason(errno));
    }
    lane.handle = {
        ah, [destroy = efa_.destroy_ah, c = rail.context, p = rail.pd](ibv_ah* a) { destroy(a); }};
    lane.remote_qpn = remote.qp_num;
    lane.remote_key = remote.psn;
}

// Stages a write. Returns false where the chain is full and the provider's queue too.
bool SrdNic::stage(Lane& each, const Write& write) {
    auto& lane = static_cast<SrdLane&>(each);
    if (lane.chain == kChain && !hand_over(lane)) return false;
    list_ready(lane);
    Staged& slot = lane.staged[lane.chain++];
    slot = {write, verbs::make_wr_id(false, lane.rank, lane.number, ++lane.posted)};
    // A write without bytes names a piece of memory all the same.
    if (write.source.length == 0) slot.write.source = {lane.landing.addr, 0, lane.landing.lkey};
    return true;
}

bool SrdNic::hand_over(Lane& each) {
    auto& lane = static_cast<SrdLane&>(each);
    if (lane.chain == 0) return true;
    ibv_qp_ex* qp = lane.extended;
    ibv_wr_start(qp);
    for (std::uint32_t i = 0; i < lane.chain; ++i) {
        const Write& write = lane.staged[i].write;
        qp->wr_id = lane.staged[i].wr_id;
        qp->wr_flags = IBV_SEND_SIGNALED;
        if (write.told) {
            ibv_wr_rdma_write_imm(qp, write.rkey, write.remote_addr, htonl(write.immediate));
        } else {
            ibv_wr_rdma_write(qp, write.rkey, write.remote_addr);
        }
        ibv_wr_set_sge(qp, write.source.lkey, write.source.addr, write.source.length);
        ibv_wr_set_ud_addr(qp, lane.handle.get(), lane.remote_qpn, lane.remote_key);
    }
    const int error = ibv_wr_complete(qp);
    if (error == ENOMEM) return false;  // nothing of it was posted
    if (error != 0) post_failed(lane, lane.staged[0].wr_id, error, "ibv_wr_complete");
    lane.chain = 0;
    return true;
}

// Notes a completion; requests complete in any order.
void SrdNic::sent(Lane& each, std::uint64_t number) {
    auto& lane = static_cast<SrdLane&>(each);
    ++lane.ended;
    lane.done[number % reach()] = 1;
    while (lane.completed < lane.posted && lane.done[(lane.completed + 1) % reach()] != 0) {
        lane.done[++lane.completed % reach()] = 0;
    }
}

}  // namespace mkernel::nics::efa
