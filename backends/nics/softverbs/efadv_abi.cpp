// The exported functions of the SRD personality: efadv's, and those of libibverbs that only it
// uses. The device is the same as the RC personality's; see verbs_abi.cpp.
#include <infiniband/efadv.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/fabric.hpp"
#include "backends/nics/verbs/efadv.hpp"

namespace soft = mkernel::nics::softverbs;
namespace verbs = mkernel::nics::verbs;

#define SOFTVERBS_EXPORT extern "C" __attribute__((visibility("default")))

SOFTVERBS_EXPORT int efadv_query_device(ibv_context* context, efadv_device_attr* attr,
                                        std::uint32_t length) {
    const auto& config = soft::Context::of(context).config;
    efadv_device_attr full{};
    full.max_sq_wr = full.max_rq_wr = soft::kSrdMaxWr;
    full.max_sq_sge = soft::kSrdSendSge;
    full.max_rq_sge = soft::kSrdReceiveSge;
    full.inline_buf_size = soft::kSrdInline;
    full.device_caps = (config.rnr_retry ? verbs::kEfaRnrRetry : 0) |
                       (config.rdma_write ? verbs::kEfaRdmaWrite : 0);
    full.max_rdma_size = config.max_message;
    std::memcpy(attr, &full, std::min<std::size_t>(length, sizeof(full)));
    return 0;
}

SOFTVERBS_EXPORT ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* init,
                                            efadv_qp_init_attr* efa, std::uint32_t length) {
    constexpr std::uint64_t kWrites =
        IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    constexpr std::uint32_t kMask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    auto& own = soft::Context::of(context);
    const auto& cap = init->cap;
    if (length < sizeof(*efa) || efa->comp_mask != 0 || init->comp_mask != kMask ||
        init->pd == nullptr || init->qp_type != IBV_QPT_DRIVER ||
        efa->driver_qp_type != EFADV_QP_DRIVER_TYPE_SRD || init->srq != nullptr ||
        init->send_cq == nullptr || init->recv_cq == nullptr || cap.max_send_wr < 1 ||
        cap.max_send_wr > soft::kSrdMaxWr || cap.max_recv_wr < 1 ||
        cap.max_recv_wr > soft::kSrdMaxWr || cap.max_send_sge > soft::kSrdSendSge ||
        cap.max_recv_sge > soft::kSrdReceiveSge || cap.max_inline_data > soft::kSrdInline) {
        return errno = EINVAL, nullptr;
    }
    // The members that follow driver_qp_type in newer headers: flags (UNSOLICITED_WRITE_RECV) and service
    // level. This device has neither.
    const bool extra = std::any_of(std::begin(efa->reserved), std::end(efa->reserved),
                                   [](std::uint8_t byte) { return byte != 0; });
    if (extra || (init->send_ops_flags & ~kWrites) != 0 ||
        ((init->send_ops_flags & kWrites) != 0 && !own.config.rdma_write)) {
        return errno = EOPNOTSUPP, nullptr;
    }
    try {
        const soft::Control lock(own);
        soft::SrdQp* qp = own.fabric.create_qp(*init);
        if (qp == nullptr) return nullptr;
        ++static_cast<soft::Pd*>(init->pd)->users;
        return &qp->qp_base;
    } catch (const std::bad_alloc&) {
        return errno = ENOMEM, nullptr;
    }
}

SOFTVERBS_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
    return qp->qp_type == IBV_QPT_DRIVER ? reinterpret_cast<ibv_qp_ex*>(qp) : nullptr;
}

SOFTVERBS_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
    soft::PortAddress address;
    if (attr->is_global == 0 || attr->port_num != 1 || !soft::decode_gid(attr->grh.dgid, address)) {
        return errno = EINVAL, nullptr;
    }
    try {
        auto& own = soft::Context::of(pd->context);
        const soft::Control lock(own);
        ibv_ah* ah = own.fabric.create_ah(pd, address);
        ++static_cast<soft::Pd*>(pd)->users;
        return ah;
    } catch (const std::bad_alloc&) {
        return errno = ENOMEM, nullptr;
    }
}

SOFTVERBS_EXPORT int ibv_destroy_ah(ibv_ah* ah) {
    auto& own = soft::Context::of(ah->context);
    const soft::Control lock(own);
    --static_cast<soft::Pd*>(ah->pd)->users;
    own.fabric.destroy_ah(static_cast<soft::AddressHandle*>(ah));
    return 0;
}
