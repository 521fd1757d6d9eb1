// The exported verbs functions of the software device. Everything here turns C structures into our
// objects, takes the control lock, and turns exceptions into errno; the work is done elsewhere.
//
// One device, "soft0", which has RC and, through efadv, SRD, with one active port that looks like
// RoCE v2 Ethernet, of 100 Gb/s where no bandwidth is set. Its GID table has two entries as on a
// real card: 0 RoCE v1, 1 RoCE v2.
#include <fcntl.h>
#include <infiniband/verbs.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "backends/nics/softverbs/completion.hpp"
#include "backends/nics/softverbs/context.hpp"
#include "backends/nics/softverbs/memory.hpp"
#include "backends/nics/softverbs/queue_pair.hpp"

// The header hides these behind macros of the same name.
#undef ibv_reg_mr
#undef ibv_query_port

namespace soft = mkernel::nics::softverbs;

#define SOFTVERBS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kMaxCqe = 1 << 22;

ibv_device* the_device() {
    static ibv_device device = [] {
        ibv_device d{};
        d.node_type = IBV_NODE_CA;
        d.transport_type = IBV_TRANSPORT_IB;
        std::strcpy(d.name, "soft0");
        std::strcpy(d.dev_name, "soft0");
        return d;
    }();
    return &device;
}

template <typename Make>
auto guarded(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::system_error& error) {
        errno = error.code().value();
    } catch (const std::bad_alloc&) {
        errno = ENOMEM;
    }
    return nullptr;
}

bool is_srd(const ibv_qp* qp) {
    return qp->qp_type == IBV_QPT_DRIVER;
}

int poll_cq(ibv_cq* cq, int count, ibv_wc* wc) {
    auto& own = *static_cast<soft::Cq*>(cq);
    const int got = own.poll(count, wc);
    constexpr std::uint32_t kAwaited = 1024;  // many more than one who is about to sleep asks for
    if (got == 0 && own.polls_in_vain.load(std::memory_order_relaxed) % kAwaited == 0) {
        soft::Context::of(cq->context).await();
    }
    return got;
}
int req_notify_cq(ibv_cq* cq, int) {
    static_cast<soft::Cq*>(cq)->armed.store(true, std::memory_order_seq_cst);
    return 0;
}
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
    // Plain post_send would carry SENDs alone on SRD, which this device does not have.
    if (is_srd(qp)) return *bad = wr, EOPNOTSUPP;
    return static_cast<soft::Qp*>(qp)->post_send(wr, bad);
}
int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
    if (is_srd(qp)) return soft::SrdQp::of(qp).post_recv(wr, bad);
    return static_cast<soft::Qp*>(qp)->post_recv(wr, bad);
}

// Returns the slowest speed of four lanes that carries the link's bandwidth; 25 Gb/s a lane without one.
std::uint8_t speed_code(std::uint64_t mbps) {
    constexpr std::pair<std::uint64_t, std::uint8_t> kFourLanes[] = {
        {10'000, 1}, {20'000, 2}, {40'000, 4}, {56'000, 16}, {100'000, 32}, {200'000, 64}};
    for (const auto& [carries, code] : kFourLanes) {
        if (mbps != 0 && mbps <= carries) return code;
    }
    return mbps == 0 ? 32 : 128;
}

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr, std::size_t size) {
    if (port != 1) return EINVAL;
    ibv_port_attr full{};
    full.state = IBV_PORT_ACTIVE;
    full.max_mtu = full.active_mtu = IBV_MTU_4096;
    full.gid_tbl_len = 2;
    const soft::Config& config = soft::Context::of(context).config;
    full.max_msg_sz = config.max_message;
    full.pkey_tbl_len = 1;
    full.active_width = 2;  // 4x
    full.active_speed = speed_code(config.bandwidth_mbps);
    full.phys_state = 5;  // link up
    full.link_layer = IBV_LINK_LAYER_ETHERNET;
    std::memcpy(attr, &full, std::min(size, sizeof(full)));
    return 0;
}

}  // namespace

SOFTVERBS_EXPORT ibv_device** ibv_get_device_list(int* count) {
    if (count != nullptr) *count = 1;
    auto** list = new (std::nothrow) ibv_device*[2]{the_device(), nullptr};
    if (list == nullptr) errno = ENOMEM;
    return list;
}
SOFTVERBS_EXPORT void ibv_free_device_list(ibv_device** list) {
    delete[] list;
}
SOFTVERBS_EXPORT const char* ibv_get_device_name(ibv_device* device) {
    return device->name;
}

SOFTVERBS_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
    return guarded([&]() -> ibv_context* {
        auto opened = std::make_unique<soft::Context>(device);
        auto& ops = opened->context.ops;
        ops.poll_cq = poll_cq;
        ops.req_notify_cq = req_notify_cq;
        ops.post_send = post_send;
        ops.post_recv = post_recv;
        opened->query_port = query_port;
        return &opened.release()->context;
    });
}
SOFTVERBS_EXPORT int ibv_close_device(ibv_context* context) {
    delete &soft::Context::of(context);
    return 0;
}

SOFTVERBS_EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
    const auto& own = soft::Context::of(context);
    *attr = {};
    std::memcpy(&attr->node_guid, &own.port.header().cookie, sizeof(attr->node_guid));
    std::strcpy(attr->fw_ver, "softverbs-1");
    attr->max_mr_size = UINT64_MAX;
    attr->page_size_cap = 4096;
    attr->max_qp = soft::kMaxQps;
    attr->max_qp_wr = soft::kMaxWr;
    attr->max_sge = soft::kMaxSge;
    attr->max_cq = 1 << 16;
    attr->max_cqe = kMaxCqe;
    attr->max_mr = soft::MrTable::kMax;
    attr->max_pd = 1 << 16;
    attr->atomic_cap = IBV_ATOMIC_NONE;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
    return 0;
}

// The provider's own entry in verbs_context serves callers of the current header; the loader looks this one
// up by name, and it fills the old, shorter structure.
SOFTVERBS_EXPORT int ibv_query_port(ibv_context* context, std::uint8_t port,
                                    _compat_ibv_port_attr* attr) {
    return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attr),
                      offsetof(ibv_port_attr, port_cap_flags2));
}

SOFTVERBS_EXPORT int ibv_query_gid(ibv_context* context, std::uint8_t port, int index,
                                   ibv_gid* gid) {
    if (port != 1 || index < 0 || index > 1) return errno = EINVAL, -1;
    *gid = soft::encode_gid(soft::Context::of(context).port.address());
    return 0;
}
SOFTVERBS_EXPORT int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port,
                                       std::uint32_t index, ibv_gid_entry* entry,
                                       std::uint32_t flags, std::size_t size) {
    if (port != 1 || index > 1 || flags != 0) return EINVAL;
    ibv_gid_entry full{};
    full.gid = soft::encode_gid(soft::Context::of(context).port.address());
    full.gid_index = index;
    full.port_num = port;
    full.gid_type = index == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
    std::memcpy(entry, &full, std::min(size, sizeof(full)));
    return 0;
}

SOFTVERBS_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
    auto* pd = new (std::nothrow) soft::Pd{};
    if (pd == nullptr) return errno = ENOMEM, nullptr;
    pd->context = context;
    return pd;
}
SOFTVERBS_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
    auto* own = static_cast<soft::Pd*>(pd);
    {
        const soft::Control lock(soft::Context::of(pd->context));
        if (own->users != 0) return EBUSY;
    }
    delete own;
    return 0;
}

namespace {

// Remote writing needs local writing, as the kernel has it.
bool sound(std::uint64_t start, std::size_t length, int access) {
    return length != 0 && start + length >= start &&
           ((access & IBV_ACCESS_REMOTE_WRITE) == 0 || (access & IBV_ACCESS_LOCAL_WRITE) != 0);
}

bool is_device_memory(std::uint64_t start, std::size_t length) {
    const auto* mover = soft::mover();
    return mover != nullptr && mover->owns(mover->self, start, length) == 1;
}

// Exports device memory. Null with errno.
std::optional<soft::DeviceBacking> export_device(std::uint64_t start, std::size_t length) {
    static std::atomic<std::uint64_t> tokens{0};
    const auto* mover = soft::mover();
    soft::DeviceBacking made;
    int fd = -1;
    const int error = mover->export_memory(mover->self, start, length, &made.exported, &fd);
    if (error != 0) return errno = -error, std::nullopt;
    made.fd = std::make_shared<const soft::Fd>(fd);
    made.token = ++tokens;
    return made;
}

ibv_mr* add_region(ibv_pd* pd, std::unique_ptr<soft::Mr> mr, std::uint64_t start,
                   std::size_t length, int access) {
    auto& context = soft::Context::of(pd->context);
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = reinterpret_cast<void*>(start);
    mr->length = length;
    mr->access = static_cast<unsigned int>(access);
    const soft::Control lock(context);
    if (context.faults.strikes(soft::FaultKind::registration, soft::now_ns())) {
        return errno = ENOMEM, nullptr;
    }
    context.faults.count_registration();
    soft::Mr* added = context.regions.add(std::move(mr));
    if (added == nullptr) return errno = ENOMEM, nullptr;
    ++static_cast<soft::Pd*>(pd)->users;
    if (added->device) context.offer(*added);
    return added;
}

ibv_mr* add_device_region(ibv_pd* pd, std::uint64_t start, std::size_t length, int access) {
    auto mr = std::make_unique<soft::Mr>();
    mr->device = export_device(start, length);
    if (!mr->device) return nullptr;
    ibv_mr* added = add_region(pd, std::move(mr), start, length, access);
    soft::Context::of(pd->context).wake();
    return added;
}

}  // namespace

SOFTVERBS_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
    return guarded([&]() -> ibv_mr* {
        const auto start = reinterpret_cast<std::uint64_t>(address);
        const bool writes = (access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) != 0;
        if (!sound(start, length, access)) return errno = EINVAL, nullptr;
        if (is_device_memory(start, length)) return add_device_region(pd, start, length, access);
        if (!soft::is_mapped(start, length, writes)) return errno = EFAULT, nullptr;
        auto mr = std::make_unique<soft::Mr>();
        mr->backing = soft::find_backing(start, length);
        return add_region(pd, std::move(mr), start, length, access);
    });
}
// Registers by the I/O address, which is the device's own; of the dmabuf only its being open is checked.
SOFTVERBS_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t, std::size_t length,
                                           std::uint64_t iova, int fd, int access) {
    return guarded([&]() -> ibv_mr* {
        if (soft::mover() == nullptr) return errno = EOPNOTSUPP, nullptr;
        if (::fcntl(fd, F_GETFD) < 0) return errno = EBADF, nullptr;
        if (!sound(iova, length, access) || !is_device_memory(iova, length)) {
            return errno = EINVAL, nullptr;
        }
        return add_device_region(pd, iova, length, access);
    });
}
SOFTVERBS_EXPORT int ibv_dereg_mr(ibv_mr* mr) {
    auto& context = soft::Context::of(mr->context);
    auto* own = static_cast<soft::Mr*>(mr);
    auto* pd = static_cast<soft::Pd*>(mr->pd);
    const soft::Control lock(context);
    if (own->device) context.withdraw(*own);
    if (own->backing) context.port.header().dropped_maps.fetch_add(1, std::memory_order_release);
    if (!context.regions.remove(own)) return EINVAL;
    --pd->users;
    return 0;
}

SOFTVERBS_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
    return guarded([&]() -> ibv_comp_channel* {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) return nullptr;
        auto* channel = new soft::Channel{};
        channel->read_end = soft::Fd(ends[0]);
        channel->write_end = soft::Fd(ends[1]);
        ::fcntl(ends[1], F_SETFL, O_NONBLOCK);
        channel->context = context;
        channel->fd = ends[0];
        return channel;
    });
}
SOFTVERBS_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
    if (channel->refcnt != 0) return EBUSY;
    delete static_cast<soft::Channel*>(channel);
    return 0;
}

SOFTVERBS_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* cq_context,
                                       ibv_comp_channel* channel, int vector) {
    return guarded([&]() -> ibv_cq* {
        if (cqe < 1 || cqe > kMaxCqe || vector != 0) return errno = EINVAL, nullptr;
        auto cq = std::make_unique<soft::Cq>();
        cq->entries.resize(std::bit_ceil(static_cast<std::uint32_t>(cqe)));
        cq->context = context;
        cq->channel = channel;
        cq->cq_context = cq_context;
        cq->cqe = static_cast<int>(cq->entries.size());
        if (channel != nullptr) ++channel->refcnt;
        return cq.release();
    });
}
SOFTVERBS_EXPORT int ibv_destroy_cq(ibv_cq* cq) {
    auto* own = static_cast<soft::Cq*>(cq);
    {
        const soft::Control lock(soft::Context::of(cq->context));
        if (own->users != 0) return EBUSY;
    }
    if (cq->channel != nullptr) --cq->channel->refcnt;
    delete own;
    return 0;
}
SOFTVERBS_EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
    if (::read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq)) return -1;
    *cq_context = (*cq)->cq_context;
    return 0;
}
SOFTVERBS_EXPORT void ibv_ack_cq_events(ibv_cq*, unsigned int) {}

SOFTVERBS_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    return guarded([&]() -> ibv_qp* {
        const auto& cap = init->cap;
        if (init->qp_type != IBV_QPT_RC || init->srq != nullptr || init->send_cq == nullptr ||
            init->recv_cq == nullptr || cap.max_send_wr < 1 || cap.max_send_wr > soft::kMaxWr ||
            cap.max_recv_wr < 1 || cap.max_recv_wr > soft::kMaxWr ||
            cap.max_send_sge > soft::kMaxSge || cap.max_recv_sge > soft::kMaxSge ||
            cap.max_inline_data > soft::kMaxInline) {
            return errno = EINVAL, nullptr;
        }
        auto& context = soft::Context::of(pd->context);
        const soft::Control lock(context);
        soft::Qp* qp = context.create_qp(*init);
        if (qp == nullptr) return nullptr;
        qp->pd = pd;
        ++static_cast<soft::Pd*>(pd)->users;
        return qp;
    });
}
SOFTVERBS_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
    auto& context = soft::Context::of(qp->context);
    int error = 0;
    {
        const soft::Control lock(context);
        error = is_srd(qp) ? soft::SrdQp::of(qp).modify(*attr, mask)
                           : static_cast<soft::Qp*>(qp)->modify(*attr, mask);
    }
    context.wake();
    return error;
}
SOFTVERBS_EXPORT int ibv_destroy_qp(ibv_qp* qp) {
    auto& context = soft::Context::of(qp->context);
    auto* pd = static_cast<soft::Pd*>(qp->pd);
    const soft::Control lock(context);
    if (is_srd(qp)) {
        context.fabric.destroy_qp(&soft::SrdQp::of(qp));
    } else {
        context.destroy_qp(static_cast<soft::Qp*>(qp));
    }
    --pd->users;
    return 0;
}

SOFTVERBS_EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
    return ::read(context->async_fd, event, sizeof(*event)) == sizeof(*event) ? 0 : -1;
}
SOFTVERBS_EXPORT void ibv_ack_async_event(ibv_async_event*) {}
