// Ends and pairs of SRD queue pairs on the software device, driven through efadv and the extended
// verbs alone.
#pragma once

#include <arpa/inet.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backends/nics/verbs/efadv.hpp"
#include "end.hpp"

namespace mkernel::nics::testing::srd {

inline constexpr std::size_t kBytes = 4 << 20;
inline constexpr std::uint32_t kKey = 0x1234;

struct Limits {
    std::uint32_t sends = 64;
    std::uint32_t receives = 512;
    int cqe = 4096;
    int rnr_retry = 7;
    bool ready = true;  // to RTS
    bool shared = true;
};

struct Address {
    ::ibv_gid gid{};
    std::uint32_t qpn = 0;
    std::uint64_t memory = 0;
    std::uint32_t rkey = 0;
};

struct End : DeviceEnd {
    explicit End(const Limits& limits = {})
        : DeviceEnd("soft0", kBytes, limits.shared, limits.cqe,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE),
          efa(std::make_unique<const verbs::Efadv>(*v, library)) {
        init.qp_type = IBV_QPT_DRIVER;
        init.send_cq = init.recv_cq = cq;
        init.pd = pd;
        init.cap = {limits.sends, limits.receives, 2, 1, 32};
        init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
        base = create();
        if (base == nullptr) return;
        qp = efa->qp_to_qp_ex(base);
        if (limits.ready) start(limits.rnr_retry);
    }
    ~End() {
        drop();
        for (ibv_ah* ah : handles) efa->destroy_ah(ah);
    }

    void drop() {
        if (base != nullptr) v->destroy_qp(base);
        base = nullptr;
    }
    [[nodiscard]] ibv_qp* create() {
        efadv_qp_init_attr attr{};
        attr.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
        return efa->create_qp_ex(context.get(), &init, &attr, sizeof(attr));
    }
    void start(int rnr_retry) {
        ibv_qp_attr a{};
        a.qp_state = IBV_QPS_INIT;
        a.port_num = 1;
        a.qkey = kKey;
        CHECK(v->modify_qp(base, &a,
                           IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
        CHECK(to(IBV_QPS_RTR) == 0);
        a.qp_state = IBV_QPS_RTS;
        a.rnr_retry = static_cast<std::uint8_t>(rnr_retry);
        CHECK(v->modify_qp(base, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RNR_RETRY) == 0);
    }
    int to(ibv_qp_state state) const { return set_state(base, state); }
    [[nodiscard]] Address address() const {
        Address a;
        v->query_gid(context.get(), 1, 0, &a.gid);
        a.qpn = base->qp_num;
        a.memory = memory.address();
        a.rkey = mr->rkey;
        return a;
    }
    ibv_ah* handle(const Address& peer) {
        ibv_ah_attr attr{};
        attr.is_global = 1;
        attr.port_num = 1;
        attr.grh.dgid = peer.gid;
        ibv_ah* ah = efa->create_ah(pd, &attr);
        if (ah != nullptr) handles.push_back(ah);
        return ah;
    }
    // One write, with its immediate if not negative. 0 or what wr_complete says.
    int write(ibv_ah* ah, const Address& peer, std::uint64_t id, std::uint32_t bytes,
              std::int64_t imm = -1, std::uint64_t from = 0, std::uint64_t to = 0) {
        ibv_wr_start(qp);
        stage(ah, peer, id, bytes, imm, from, to);
        return ibv_wr_complete(qp);
    }
    void stage(ibv_ah* ah, const Address& peer, std::uint64_t id, std::uint32_t bytes,
               std::int64_t imm = -1, std::uint64_t from = 0, std::uint64_t to = 0,
               unsigned flags = IBV_SEND_SIGNALED) {
        qp->wr_id = id;
        qp->wr_flags = flags;
        if (imm < 0) {
            ibv_wr_rdma_write(qp, peer.rkey, peer.memory + to);
        } else {
            ibv_wr_rdma_write_imm(qp, peer.rkey, peer.memory + to,
                                  htonl(static_cast<std::uint32_t>(imm)));
        }
        ibv_wr_set_sge(qp, mr->lkey, memory.address() + from, bytes);
        ibv_wr_set_ud_addr(qp, ah, peer.qpn, kKey);
    }
    int receive(std::uint64_t id, int pieces = 1) const {
        ibv_sge sge{memory.address(), 0, mr->lkey};
        ibv_recv_wr wr{};
        wr.wr_id = id;
        wr.sg_list = &sge;
        wr.num_sge = pieces;
        ibv_recv_wr* bad = nullptr;
        return ibv_post_recv(base, &wr, &bad);
    }
    [[nodiscard]] bool completes(std::uint64_t id, ibv_wc_status status) const {
        return DeviceEnd::completes(base, id, status);
    }

    std::unique_ptr<const verbs::Efadv> efa;
    ibv_qp_init_attr_ex init{};
    ibv_qp* base = nullptr;
    ibv_qp_ex* qp = nullptr;
    std::vector<ibv_ah*> handles;
};

// `a` sends to `b`; each has the other's handle.
struct Pair {
    explicit Pair(const Limits& la = {}, const Limits& lb = {})
        : a(la), b(lb), peer(b.address()), ah(a.handle(peer)) {
        b.handle(a.address());
    }
    int write(std::uint64_t id, std::uint32_t bytes, std::int64_t imm = -1, std::uint64_t from = 0,
              std::uint64_t to = 0) {
        return a.write(ah, peer, id, bytes, imm, from, to);
    }
    End a, b;
    Address peer;
    ibv_ah* ah;
};

}  // namespace mkernel::nics::testing::srd
