// A verbs library whose device completes everything at once and moves nothing but single words (a
// sender waits for its credits): what is left of a put's time on it is our own work. A queue pair is
// its own peer, so an immediate arrives where it was sent. What it reports and how it fails can be
// set: see null_verbs.hpp. For one queue pair and one thread at a time; loaded as libibverbs is.
#include <infiniband/verbs.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "null_verbs.hpp"

// The header hides these behind macros of the same name.
#undef ibv_reg_mr
#undef ibv_query_port

#define NULL_VERBS_EXPORT extern "C" __attribute__((visibility("default")))

using mkernel::nics::testing::NullDevice;

NULL_VERBS_EXPORT NullDevice* null_verbs_device() {
    static NullDevice device = [] {
        NullDevice made;
        for (auto& port : made.ports) {
            auto& a = port.attributes;
            a.state = IBV_PORT_ACTIVE;
            a.max_mtu = a.active_mtu = IBV_MTU_4096;
            a.max_msg_sz = 1u << 30;
            a.lid = 1;
            a.link_layer = IBV_LINK_LAYER_INFINIBAND;
            port.gids.resize(1);
            port.gids[0].gid.raw[0] = 0xfe;
        }
        return made;
    }();
    return &device;
}

namespace {

constexpr std::uint64_t kEntries = 1 << 14;

struct Queue : ibv_cq {
    std::array<ibv_wc, kEntries> entries{};
    std::uint64_t head = 0;
    std::uint64_t tail = 0;
};

struct Pair : ibv_qp {
    std::uint64_t receives = 0;
    std::uint64_t receive_id = 0;  // the backend gives all receives of a peer the same
};

ibv_device* the_device() {
    static ibv_device device = [] {
        ibv_device d{};
        std::strcpy(d.name, "null0");
        return d;
    }();
    return &device;
}

int poll_cq(ibv_cq* cq, int count, ibv_wc* out) {
    auto& queue = *static_cast<Queue*>(cq);
    int got = 0;
    while (got < count && queue.tail != queue.head) {
        out[got++] = queue.entries[queue.tail++ % kEntries];
    }
    return got;
}

int req_notify_cq(ibv_cq*, int) {
    return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
    auto& pair = *static_cast<Pair*>(qp);
    auto& queue = *static_cast<Queue*>(qp->send_cq);
    for (; wr != nullptr; wr = wr->next) {
        const bool immediate = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        if (queue.head - queue.tail + 2 > kEntries || (immediate && pair.receives == 0)) {
            *bad = wr;
            return ENOMEM;
        }
        if (wr->num_sge == 1 && wr->sg_list->length == sizeof(std::uint64_t)) {
            std::memcpy(reinterpret_cast<void*>(wr->wr.rdma.remote_addr),
                        reinterpret_cast<void*>(wr->sg_list->addr), sizeof(std::uint64_t));
        }
        if (immediate) {
            --pair.receives;
            ibv_wc& wc = queue.entries[queue.head++ % kEntries];
            wc.wr_id = pair.receive_id;
            wc.status = IBV_WC_SUCCESS;
            wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
            wc.wc_flags = IBV_WC_WITH_IMM;
            wc.imm_data = wr->imm_data;
            wc.qp_num = qp->qp_num;
        }
        if ((wr->send_flags & IBV_SEND_SIGNALED) != 0) {
            ibv_wc& wc = queue.entries[queue.head++ % kEntries];
            wc.wr_id = wr->wr_id;
            wc.status = null_verbs_device()->status;
            wc.vendor_err = null_verbs_device()->vendor_err;
            wc.opcode = IBV_WC_RDMA_WRITE;
            wc.wc_flags = 0;
            wc.qp_num = qp->qp_num;
        }
    }
    return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr**) {
    auto& pair = *static_cast<Pair*>(qp);
    for (; wr != nullptr; wr = wr->next) {
        ++pair.receives;
        pair.receive_id = wr->wr_id;
    }
    return 0;
}

}  // namespace

NULL_VERBS_EXPORT ibv_device** ibv_get_device_list(int* count) {
    *count = 1;
    return new ibv_device*[2]{the_device(), nullptr};
}
NULL_VERBS_EXPORT void ibv_free_device_list(ibv_device** list) {
    delete[] list;
}
NULL_VERBS_EXPORT const char* ibv_get_device_name(ibv_device* device) {
    return device->name;
}
NULL_VERBS_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
    auto* context = new ibv_context{};
    context->device = device;
    context->async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    return context;
}
NULL_VERBS_EXPORT int ibv_close_device(ibv_context* context) {
    ::close(context->async_fd);
    delete context;
    return 0;
}
NULL_VERBS_EXPORT int ibv_query_device(ibv_context*, ibv_device_attr* attr) {
    *attr = {};
    attr->max_qp_wr = attr->max_cqe = kEntries;
    attr->max_sge = 1;
    attr->phys_port_cnt = 2;
    return 0;
}
NULL_VERBS_EXPORT int ibv_query_port(ibv_context*, std::uint8_t port, _compat_ibv_port_attr* attr) {
    const auto& chosen = null_verbs_device()->ports[port - 1];
    ibv_port_attr full = chosen.attributes;
    full.gid_tbl_len = static_cast<int>(chosen.gids.size());
    std::memcpy(reinterpret_cast<void*>(attr), &full, offsetof(ibv_port_attr, port_cap_flags2));
    return 0;
}
NULL_VERBS_EXPORT int ibv_query_gid(ibv_context*, std::uint8_t port, int index, ibv_gid* gid) {
    *gid = null_verbs_device()->ports[port - 1].gids[static_cast<std::size_t>(index)].gid;
    return 0;
}
NULL_VERBS_EXPORT int _ibv_query_gid_ex(ibv_context*, std::uint32_t port, std::uint32_t index,
                                        ibv_gid_entry* entry, std::uint32_t, std::size_t) {
    if (!null_verbs_device()->extended_gids) return EOPNOTSUPP;
    *entry = null_verbs_device()->ports[port - 1].gids[index];
    return 0;
}
NULL_VERBS_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
    auto* pd = new ibv_pd{};
    pd->context = context;
    return pd;
}
NULL_VERBS_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
    delete pd;
    return 0;
}
NULL_VERBS_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
    null_verbs_device()->registration = {
        false, reinterpret_cast<std::uint64_t>(address), 0, length, -1, access};
    auto* mr = new ibv_mr{};
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = address;
    mr->length = length;
    return mr;
}
NULL_VERBS_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length,
                                            std::uint64_t iova, int fd, int access) {
    auto& device = *null_verbs_device();
    if (device.dmabuf_errno != 0) return errno = device.dmabuf_errno, nullptr;
    if (fd < 0) return errno = EBADF, nullptr;
    // As the system's does: the region's address is the offset.
    ibv_mr* mr = ibv_reg_mr(pd, reinterpret_cast<void*>(offset), length, access);
    device.registration = {true, iova, offset, length, fd, access};
    return mr;
}
NULL_VERBS_EXPORT int ibv_dereg_mr(ibv_mr* mr) {
    delete mr;
    return 0;
}
NULL_VERBS_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
    auto* channel = new ibv_comp_channel{};
    channel->context = context;
    channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return channel;
}
NULL_VERBS_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
    ::close(channel->fd);
    delete channel;
    return 0;
}
NULL_VERBS_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int, void*, ibv_comp_channel* channel,
                                        int) {
    auto* queue = new Queue{};
    queue->context = context;
    queue->channel = channel;
    return queue;
}
NULL_VERBS_EXPORT int ibv_destroy_cq(ibv_cq* cq) {
    delete static_cast<Queue*>(cq);
    return 0;
}
NULL_VERBS_EXPORT int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) {
    return -1;
}
NULL_VERBS_EXPORT void ibv_ack_cq_events(ibv_cq*, unsigned int) {}
NULL_VERBS_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    auto* pair = new Pair{};
    pair->context = pd->context;
    pair->pd = pd;
    pair->send_cq = init->send_cq;
    pair->recv_cq = init->recv_cq;
    pair->qp_num = 1;
    null_verbs_device()->qp = pair;
    return pair;
}
NULL_VERBS_EXPORT int ibv_modify_qp(ibv_qp*, ibv_qp_attr* attr, int) {
    if (attr->qp_state == IBV_QPS_RTR) null_verbs_device()->to_rtr = *attr;
    if (attr->qp_state == IBV_QPS_RTS) null_verbs_device()->to_rts = *attr;
    return 0;
}
NULL_VERBS_EXPORT int ibv_destroy_qp(ibv_qp* qp) {
    delete static_cast<Pair*>(qp);
    return 0;
}
NULL_VERBS_EXPORT int ibv_get_async_event(ibv_context*, ibv_async_event* event) {
    auto& events = null_verbs_device()->events;
    if (events.empty()) return -1;
    *event = events.back();
    events.pop_back();
    return 0;
}
NULL_VERBS_EXPORT void ibv_ack_async_event(ibv_async_event*) {}
