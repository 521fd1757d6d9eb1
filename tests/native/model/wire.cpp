#include "tests/native/model/wire.hpp"

#include <arpa/inet.h>
#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>

#include "backends/nics/verbs/efadv.hpp"
#include "backends/nics/verbs/immediate.hpp"
#include "backends/transport/atomics.hpp"
#include "tests/native/model/explore.hpp"

// The header hides these behind macros of the same name.
#undef ibv_reg_mr
#undef ibv_query_port

namespace mkernel::model {

namespace verbs = nics::verbs;

struct Network::Queue : ibv_cq {
    std::vector<ibv_wc> entries;
    std::size_t room = 0, taken = 0;
    std::uint64_t produced = 0;  // a word: how many entries there are

    void push(const ibv_wc& wc) {
        require(entries.size() - taken < room, "a completion queue overflows");
        entries.push_back(wc);
        transport::store_release(&produced, entries.size());
    }
};

struct Network::Pair : ibv_qp_ex {
    bool srd = false;
    std::uint32_t peer = 0;       // RC
    std::vector<Message> staged;  // SRD, between start and complete
    std::deque<Message> sends;    // whose places stay
    std::uint64_t posted = 0;     // a word: how many sends there are
    std::deque<std::uint64_t> receives;

    static Pair& of(ibv_qp* pair) {
        return *static_cast<Pair*>(reinterpret_cast<ibv_qp_ex*>(pair));
    }
    static Pair& of(ibv_qp_ex* pair) { return *static_cast<Pair*>(pair); }

    void post(const std::vector<Message>& messages) {
        sends.insert(sends.end(), messages.begin(), messages.end());
        transport::store_release(&posted, sends.size());
    }
};

namespace {

constexpr std::size_t kHeldUntil = 8;  // so many others are posted, and those seen

Network* network = nullptr;  // of the execution under way

template <class Touch>
void by_blocks(std::uint64_t address, std::uint64_t bytes, Touch touch) {
    for (std::uint64_t at = address / kBlock * kBlock; at < address + bytes; at += kBlock) {
        touch(reinterpret_cast<const void*>(at));
    }
}

}  // namespace

void reads_bytes(std::uint64_t address, std::uint64_t bytes) {
    by_blocks(address, bytes, reads);
}
void writes_bytes(std::uint64_t address, std::uint64_t bytes) {
    by_blocks(address, bytes, writes);
}

Network::Network(std::uint64_t bytes, Broken how) : most_bytes(bytes), broken(how) {
    network = this;
}
Network::~Network() {
    network = nullptr;
}

void Network::place(const Message& message) {
    if (message.bytes == 0) return;
    const auto touches = [&](std::uint64_t address) {
        return std::any_of(data_.begin(), data_.end(), [&](const auto& area) {
            return address >= area.first && address < area.first + area.second;
        });
    };
    if (touches(message.from)) reads_bytes(message.from, message.bytes);
    if (touches(message.to)) writes_bytes(message.to, message.bytes);
    std::memcpy(reinterpret_cast<void*>(message.to), reinterpret_cast<void*>(message.from),
                message.bytes);
}

void Network::deliver(Message& message) {
    message.delivered = true;
    if (!message.told) return;
    Pair& other = *pairs.at(message.peer_qp - 1);
    require(!other.receives.empty(), "an immediate finds no receive");
    ibv_wc wc{};
    wc.wr_id = other.receives.front();
    other.receives.pop_front();
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    wc.wc_flags = IBV_WC_WITH_IMM;
    std::uint32_t immediate = message.immediate;
    if (broken == Broken::loses_the_last && verbs::is_group(immediate) &&
        verbs::kind_of(immediate) == verbs::Kind::part && verbs::payload_of(immediate) > 1) {
        --immediate;
    }
    wc.imm_data = htonl(immediate);
    wc.qp_num = other.qp_base.qp_num;
    static_cast<Queue*>(other.qp_base.recv_cq)->push(wc);
}

bool Network::held_back(const Pair& pair, std::uint64_t number) const {
    if (broken != Broken::holds_one_back || number != 0) return false;
    const auto& there = *static_cast<Queue*>(pairs.at(pair.sends[0].peer_qp - 1)->qp_base.recv_cq);
    return pair.sends.size() <= kHeldUntil || there.taken != there.entries.size();
}

bool Network::step() {
    std::vector<std::function<void()>> next;
    for (const auto& each : pairs) {
        Pair& pair = *each;
        const std::uint64_t posted = transport::load_acquire(&pair.posted);
        const auto complete = [&pair](Message& message) {
            message.completed = true;
            if (!message.signaled) return;
            ibv_wc wc{};
            wc.wr_id = message.wr_id;
            wc.status = IBV_WC_SUCCESS;
            wc.opcode = IBV_WC_RDMA_WRITE;
            wc.qp_num = pair.qp_base.qp_num;
            static_cast<Queue*>(pair.qp_base.send_cq)->push(wc);
        };
        bool in_order = !pair.srd && broken != Broken::rc_reorders;
        bool arrives = true, completes = true;  // another one may
        for (std::uint64_t i = 0; i < posted; ++i) {
            Message& message = pair.sends[i];
            if (!message.placed && arrives && !held_back(pair, i)) {
                next.emplace_back([this, &message] {
                    if (broken == Broken::arrives_early) {
                        if (!message.delivered) return deliver(message);
                        place(message);
                        message.placed = true;
                        return;
                    }
                    place(message);
                    message.placed = true;
                    deliver(message);
                });
                if (in_order) arrives = false;
            }
            const bool may = message.placed || broken == Broken::completes_early ||
                             broken == Broken::holds_one_back;
            if (!message.completed && completes) {
                if (may) next.emplace_back([complete, &message] { complete(message); });
                if (in_order) completes = false;
            }
        }
    }
    if (next.empty()) return false;
    next[choose(next.size())]();
    return true;
}

namespace {

using Pair = Network::Pair;
using Queue = Network::Queue;

int poll_cq(ibv_cq* cq, int count, ibv_wc* out) {
    auto& queue = *static_cast<Queue*>(cq);
    const std::uint64_t produced = transport::load_acquire(&queue.produced);
    int got = 0;
    while (got < count && queue.taken < produced) out[got++] = queue.entries[queue.taken++];
    return got;
}

int req_notify_cq(ibv_cq*, int) {
    return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr**) {
    Pair& pair = Pair::of(qp);
    std::vector<Network::Message> messages;
    for (; wr != nullptr; wr = wr->next) {
        Network::Message& made = messages.emplace_back();
        made.wr_id = wr->wr_id;
        made.told = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        made.immediate = ntohl(wr->imm_data);
        made.signaled = (wr->send_flags & IBV_SEND_SIGNALED) != 0;
        made.peer_qp = pair.peer;
        made.to = wr->wr.rdma.remote_addr;
        if (wr->num_sge == 1) {
            made.from = wr->sg_list->addr;
            made.bytes = wr->sg_list->length;
        }
    }
    pair.post(messages);
    return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr**) {
    for (; wr != nullptr; wr = wr->next) Pair::of(qp).receives.push_back(wr->wr_id);
    return 0;
}

Network::Message& stage(ibv_qp_ex* qp, std::uint64_t to) {
    Network::Message& made = Pair::of(qp).staged.emplace_back();
    made.wr_id = qp->wr_id;
    made.signaled = true;
    made.to = to;
    return made;
}

ibv_qp* new_pair(ibv_context* context, ibv_pd* pd, ibv_cq* sends, ibv_cq* receives, bool srd) {
    Pair& pair = *network->pairs.emplace_back(std::make_unique<Pair>());
    pair.qp_base.context = context;
    pair.qp_base.pd = pd;
    pair.qp_base.send_cq = sends;
    pair.qp_base.recv_cq = receives;
    pair.qp_base.qp_num = static_cast<std::uint32_t>(network->pairs.size());
    pair.srd = srd;
    pair.wr_start = [](ibv_qp_ex* qp) { Pair::of(qp).staged.clear(); };
    pair.wr_rdma_write = [](ibv_qp_ex* qp, std::uint32_t, std::uint64_t to) { stage(qp, to); };
    pair.wr_rdma_write_imm = [](ibv_qp_ex* qp, std::uint32_t, std::uint64_t to, __be32 immediate) {
        Network::Message& made = stage(qp, to);
        made.told = true;
        made.immediate = ntohl(immediate);
    };
    pair.wr_set_sge = [](ibv_qp_ex* qp, std::uint32_t, std::uint64_t from, std::uint32_t bytes) {
        Pair::of(qp).staged.back().from = from;
        Pair::of(qp).staged.back().bytes = bytes;
    };
    pair.wr_set_ud_addr = [](ibv_qp_ex* qp, ibv_ah*, std::uint32_t number, std::uint32_t) {
        Pair::of(qp).staged.back().peer_qp = number;
    };
    pair.wr_complete = [](ibv_qp_ex* qp) {
        Pair::of(qp).post(Pair::of(qp).staged);
        return 0;
    };
    return &pair.qp_base;
}

ibv_device* the_device() {
    static ibv_device device = [] {
        ibv_device made{};
        std::strcpy(made.name, "model0");
        return made;
    }();
    return &device;
}

constexpr int kMost = 1 << 10;  // requests of a queue pair

}  // namespace
}  // namespace mkernel::model

#define MODEL_EXPORT extern "C" __attribute__((visibility("default")))

using namespace mkernel::model;

MODEL_EXPORT ibv_device** ibv_get_device_list(int* count) {
    *count = 1;
    return new ibv_device*[2]{the_device(), nullptr};
}
MODEL_EXPORT void ibv_free_device_list(ibv_device** list) {
    delete[] list;
}
MODEL_EXPORT const char* ibv_get_device_name(ibv_device* device) {
    return device->name;
}
MODEL_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
    auto* context = new ibv_context{};
    context->device = device;
    context->async_fd = -1;  // nobody sleeps
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    return context;
}
MODEL_EXPORT int ibv_close_device(ibv_context* context) {
    delete context;
    return 0;
}
MODEL_EXPORT int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
    *attributes = {};
    attributes->max_qp_wr = attributes->max_cqe = kMost;
    attributes->max_sge = 1;
    attributes->phys_port_cnt = 1;
    return 0;
}
MODEL_EXPORT int ibv_query_port(ibv_context*, std::uint8_t, _compat_ibv_port_attr* attributes) {
    ibv_port_attr full{};
    full.state = IBV_PORT_ACTIVE;
    full.max_mtu = full.active_mtu = IBV_MTU_4096;
    full.max_msg_sz = static_cast<std::uint32_t>(network->most_bytes);
    full.lid = 1;
    full.link_layer = IBV_LINK_LAYER_INFINIBAND;
    full.gid_tbl_len = 1;
    std::memcpy(reinterpret_cast<void*>(attributes), &full,
                offsetof(ibv_port_attr, port_cap_flags2));
    return 0;
}
MODEL_EXPORT int ibv_query_gid(ibv_context*, std::uint8_t, int, ibv_gid* gid) {
    *gid = {};
    gid->raw[0] = 0xfe;
    return 0;
}
MODEL_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
    return new ibv_pd{.context = context, .handle = 0};
}
MODEL_EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
    delete pd;
    return 0;
}
MODEL_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int) {
    auto* made = new ibv_mr{};
    made->context = pd->context;
    made->pd = pd;
    made->addr = address;
    made->length = length;
    return made;
}
MODEL_EXPORT int ibv_dereg_mr(ibv_mr* mr) {
    delete mr;
    return 0;
}
MODEL_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
    auto* channel = new ibv_comp_channel{};
    channel->context = context;
    channel->fd = -1;
    return channel;
}
MODEL_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
    delete channel;
    return 0;
}
MODEL_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int room, void*, ibv_comp_channel* channel,
                                   int) {
    auto* queue = new Queue{};
    queue->context = context;
    queue->channel = channel;
    queue->room = static_cast<std::size_t>(room);
    return queue;
}
MODEL_EXPORT int ibv_destroy_cq(ibv_cq* queue) {
    delete static_cast<Queue*>(queue);
    return 0;
}
MODEL_EXPORT int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) {
    return -1;
}
MODEL_EXPORT void ibv_ack_cq_events(ibv_cq*, unsigned int) {}
MODEL_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    init->cap.max_inline_data = 0;
    return new_pair(pd->context, pd, init->send_cq, init->recv_cq, false);
}
MODEL_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int) {
    if (attributes->qp_state == IBV_QPS_RTR) Pair::of(qp).peer = attributes->dest_qp_num;
    return 0;
}
// With the network.
MODEL_EXPORT int ibv_destroy_qp(ibv_qp*) {
    return 0;
}
MODEL_EXPORT int ibv_get_async_event(ibv_context*, ibv_async_event*) {
    return -1;
}
MODEL_EXPORT void ibv_ack_async_event(ibv_async_event*) {}

MODEL_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr*) {
    return new ibv_ah{.context = pd->context, .pd = pd, .handle = 0};
}
MODEL_EXPORT int ibv_destroy_ah(ibv_ah* handle) {
    delete handle;
    return 0;
}
MODEL_EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
    return reinterpret_cast<ibv_qp_ex*>(qp);
}
MODEL_EXPORT int efadv_query_device(ibv_context*, efadv_device_attr* attributes, std::uint32_t) {
    *attributes = {};
    attributes->max_sq_wr = attributes->max_rq_wr = kMost;
    attributes->max_sq_sge = attributes->max_rq_sge = 1;
    attributes->device_caps = verbs::kEfaRdmaWrite | verbs::kEfaRnrRetry;
    attributes->max_rdma_size = static_cast<std::uint32_t>(network->most_bytes);
    return 0;
}
MODEL_EXPORT ibv_qp* efadv_create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* init,
                                        efadv_qp_init_attr*, std::uint32_t) {
    return new_pair(context, init->pd, init->send_cq, init->recv_cq, true);
}
