// Ends and connected pairs of RC queue pairs on one device, driven through verbs alone.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <string>

#include "end.hpp"

namespace mkernel::nics::testing::rc {

inline std::string device = "soft0";

struct Limits {
    std::uint32_t sends = 16;
    std::uint32_t receives = 16;
    int cqe = 64;
    std::uint8_t timeout = 8;  // about 1 ms a try
    std::uint8_t retries = 3;
    std::uint8_t rnr_retry = 2;
    std::uint8_t rnr_timer = 14;  // 1.28 ms
    unsigned int qp_access = IBV_ACCESS_REMOTE_WRITE;
    unsigned int mr_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    bool shared = true;  // memory in a memfd: payloads go by reference
};

inline constexpr std::size_t kBytes = 1 << 20;

struct End : DeviceEnd {
    explicit End(const Limits& limits = {})
        : DeviceEnd(device, kBytes, limits.shared, limits.cqe, limits.mr_access), limits(limits) {
        ibv_qp_init_attr init{};
        init.qp_type = IBV_QPT_RC;
        init.send_cq = init.recv_cq = cq;
        init.cap = {limits.sends, limits.receives, 1, 1, 64};
        qp = v->create_qp(pd, &init);
        ::fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
    }
    ~End() { drop_qp(); }

    void drop_qp() {
        if (qp != nullptr) v->destroy_qp(qp);
        qp = nullptr;
    }
    int init() {
        ibv_qp_attr a{};
        a.qp_state = IBV_QPS_INIT;
        a.port_num = 1;
        a.qp_access_flags = limits.qp_access;
        return v->modify_qp(qp, &a,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    }
    int rtr(const End& peer) {
        ibv_qp_attr a{};
        a.qp_state = IBV_QPS_RTR;
        a.path_mtu = IBV_MTU_4096;
        a.dest_qp_num = peer.qp->qp_num;
        a.min_rnr_timer = limits.rnr_timer;
        a.ah_attr.is_global = 1;
        a.ah_attr.port_num = 1;
        a.ah_attr.grh.sgid_index = 1;  // the same port's where the device is the kernel's
        a.ah_attr.grh.hop_limit = 1;
        v->query_gid(peer.context.get(), 1, 1, &a.ah_attr.grh.dgid);
        return v->modify_qp(qp, &a,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    }
    int rts() {
        ibv_qp_attr a{};
        a.qp_state = IBV_QPS_RTS;
        a.timeout = limits.timeout;
        a.retry_cnt = limits.retries;
        a.rnr_retry = limits.rnr_retry;
        return v->modify_qp(qp, &a,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    }
    int to(ibv_qp_state state) const { return set_state(qp, state); }
    [[nodiscard]] ibv_send_wr write(ibv_sge& sge, const End& peer, std::uint64_t id) const {
        ibv_send_wr wr{};
        wr.wr_id = id;
        wr.sg_list = &sge;
        wr.num_sge = sge.length != 0 ? 1 : 0;
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.wr.rdma.remote_addr = peer.memory.address();
        wr.wr.rdma.rkey = peer.mr->rkey;
        return wr;
    }
    [[nodiscard]] ibv_sge sge(std::uint32_t length, std::uint64_t offset = 0) const {
        return {memory.address() + offset, length, mr->lkey};
    }
    int post(ibv_send_wr wr) {
        ibv_send_wr* bad = nullptr;
        return ibv_post_send(qp, &wr, &bad);
    }
    int receive(std::uint64_t id) {
        ibv_recv_wr wr{};
        wr.wr_id = id;
        ibv_recv_wr* bad = nullptr;
        return ibv_post_recv(qp, &wr, &bad);
    }
    bool completes(std::uint64_t id, ibv_wc_status status) const {
        return DeviceEnd::completes(qp, id, status);
    }

    Limits limits;
    ibv_qp* qp;
};

struct Pair {
    explicit Pair(const Limits& la = {}, const Limits& lb = {}) : a(la), b(lb) {
        CHECK(a.init() == 0 && b.init() == 0);
        CHECK(a.rtr(b) == 0 && b.rtr(a) == 0);
        CHECK(a.rts() == 0 && b.rts() == 0);
    }
    End a;
    End b;
};

}  // namespace mkernel::nics::testing::rc
