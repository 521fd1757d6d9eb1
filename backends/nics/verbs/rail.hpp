// A rail: one port of a device, opened for a session, with its protection domain and completion
// queues.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/nics/nic.hpp"
#include "backends/nics/verbs/devices.hpp"
#include "backends/nics/verbs/loader.hpp"

namespace mkernel::nics::verbs {

struct PortName {
    std::string device;
    std::uint8_t port = 1;
};

// Returns an errno, in words.
std::string reason(int error);

class Rail {
  public:
    static constexpr std::uint32_t kQpsPerQueue = 16;  // that share a completion queue

    // Opens the port `name`, rail number `index` of its session. Throws SetupError.
    Rail(std::shared_ptr<const Verbs> verbs, std::uint32_t index, const PortName& name,
         std::optional<int> gid_index);

    // Returns the completion queue for another queue pair, which needs room for `entries` in it; the same
    // number for all of a rail. SetupError.
    std::shared_ptr<ibv_cq> queue(std::uint32_t entries);
    [[nodiscard]] const std::vector<std::shared_ptr<ibv_cq>>& queues() const { return queues_; }

    // Takes a new queue pair in; it is destroyed before `cq` and the rail's own. SetupError: null.
    std::shared_ptr<ibv_qp> own(ibv_qp* qp, std::shared_ptr<ibv_cq> cq, std::uint32_t peer) const;
    std::shared_ptr<ibv_mr> own(ibv_mr* mr) const;

    // `endpoint` returns what all endpoints on this rail have in common; `remote_gid` returns the remote
    // end's GID, checked.
    [[nodiscard]] Endpoint endpoint() const;
    [[nodiscard]] ::ibv_gid remote_gid(std::uint32_t rank, const Endpoint& remote) const;

    // Returns the descriptors of completion events, then of asynchronous ones.
    [[nodiscard]] std::array<int, 2> descriptors() const {
        return {channel_->fd, context->async_fd};
    }
    void clear_completion_events() const;

    const std::shared_ptr<const Verbs> verbs;
    const std::uint32_t index;
    const std::string name;  // of the device
    const std::uint8_t port_number;
    std::shared_ptr<ibv_context> context;
    std::shared_ptr<ibv_pd> pd;
    ibv_port_attr port{};
    ibv_device_attr limits{};
    GidChoice gid;
    bool takes_dmabuf = false;  // registers dmabufs

  private:
    std::shared_ptr<ibv_comp_channel> channel_;
    std::vector<std::shared_ptr<ibv_cq>> queues_;
    std::uint32_t sharing_ = 0;  // queue pairs in the last queue
};

}  // namespace mkernel::nics::verbs
