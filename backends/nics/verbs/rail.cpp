#include "backends/nics/verbs/rail.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mkernel::nics::verbs {
namespace {

void set_nonblocking(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

}  // namespace

std::string reason(int error) {
    return std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
}

Rail::Rail(std::shared_ptr<const Verbs> loaded, std::uint32_t index, const PortName& port_name,
           std::optional<int> gid_index)
    : verbs(std::move(loaded)),
      index(index),
      name(port_name.device),
      port_number(port_name.port),
      context(open_device(verbs, name)) {
    if (int error = verbs->query_device(context.get(), &limits); error != 0) {
        throw SetupError(name + ": ibv_query_device failed: " + reason(error));
    }
    if (int error = verbs->query_port(context.get(), port_number, &port); error != 0) {
        throw SetupError(name + ": ibv_query_port(" + std::to_string(port_number) +
                         ") failed: " + reason(error));
    }
    if (port.state != IBV_PORT_ACTIVE) {
        throw SetupError(name + " port " + std::to_string(port_number) + " is not active (state " +
                         std::to_string(port.state) + "); bring its link up");
    }
    gid = choose_gid(*verbs, context.get(), port_number, port, gid_index);
    ibv_pd* domain = verbs->alloc_pd(context.get());
    if (domain == nullptr) throw SetupError(name + ": ibv_alloc_pd failed: " + reason(errno));
    pd = {domain, [v = verbs, c = context](ibv_pd* p) { v->dealloc_pd(p); }};
    takes_dmabuf = registers_dmabufs(*verbs, domain);
    ibv_comp_channel* channel = verbs->create_comp_channel(context.get());
    if (channel == nullptr) {
        throw SetupError(name + ": ibv_create_comp_channel failed: " + reason(errno));
    }
    channel_ = {channel,
                [v = verbs, c = context](ibv_comp_channel* p) { v->destroy_comp_channel(p); }};
    set_nonblocking(channel_->fd);
    set_nonblocking(context->async_fd);
}

std::shared_ptr<ibv_cq> Rail::queue(std::uint32_t entries) {
    const auto limit = static_cast<std::uint32_t>(std::max(limits.max_cqe, 1));
    const std::uint32_t most = std::clamp(limit / entries, 1u, kQpsPerQueue);
    if (!queues_.empty() && sharing_ < most) {
        ++sharing_;
        return queues_.back();
    }
    ibv_cq* cq = verbs->create_cq(context.get(), static_cast<int>(std::min(entries * most, limit)),
                                  nullptr, channel_.get(), 0);
    if (cq == nullptr) {
        throw SetupError(name + ": ibv_create_cq of " + std::to_string(entries * most) +
                         " entries failed: " + reason(errno) +
                         "; lower queue_depth and receive_depth, or raise the limit of locked "
                         "memory (ulimit -l)");
    }
    queues_.emplace_back(cq,
                         [v = verbs, c = context, ch = channel_](ibv_cq* p) { v->destroy_cq(p); });
    sharing_ = 1;
    return queues_.back();
}

std::shared_ptr<ibv_qp> Rail::own(ibv_qp* qp, std::shared_ptr<ibv_cq> cq,
                                  std::uint32_t peer) const {
    if (qp == nullptr) {
        throw SetupError(name + ": no queue pair for peer " + std::to_string(peer) + ": " +
                         reason(errno) +
                         "; lower queue_depth, receive_depth or qps, or raise the limit of locked "
                         "memory (ulimit -l)");
    }
    return {qp,
            [v = verbs, c = context, p = pd, q = std::move(cq)](ibv_qp* p1) { v->destroy_qp(p1); }};
}

std::shared_ptr<ibv_mr> Rail::own(ibv_mr* mr) const {
    return {mr, [v = verbs, c = context, p = pd](ibv_mr* each) { v->dereg_mr(each); }};
}

Endpoint Rail::endpoint() const {
    Endpoint mine;
    mine.lid = port.lid;
    mine.mtu = 128u << static_cast<unsigned>(port.active_mtu);
    mine.gid = gid_text(gid.gid);
    mine.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    mine.rail = index;
    return mine;
}

::ibv_gid Rail::remote_gid(std::uint32_t rank, const Endpoint& remote) const {
    const bool ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    if (ethernet != remote.ethernet) {
        throw SetupError("peer " + std::to_string(rank) + " is on " +
                         (remote.ethernet ? "Ethernet" : "InfiniBand") + ", " + name + " on " +
                         (ethernet ? "Ethernet" : "InfiniBand") +
                         "; choose devices of one link layer");
    }
    const auto parsed = parse_gid(remote.gid);
    if (!parsed) {
        throw SetupError("peer " + std::to_string(rank) + " sent the GID '" + remote.gid +
                         "'; expected 32 hexadecimal digits");
    }
    return *parsed;
}

void Rail::clear_completion_events() const {
    ibv_cq* queue = nullptr;
    void* tag = nullptr;
    while (verbs->get_cq_event(channel_.get(), &queue, &tag) == 0) verbs->ack_cq_events(queue, 1);
}

}  // namespace mkernel::nics::verbs
