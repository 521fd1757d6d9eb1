// What an end of either kind of queue pair has on its device: memory, a domain, a completion queue.
#pragma once

#include <poll.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "backends/nics/verbs/devices.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "backends/transport/signal_pad.hpp"
#include "check.hpp"
#include "pair.hpp"

namespace mkernel::nics::testing {

using transport::monotonic_ns;

struct DeviceEnd {
    DeviceEnd(const std::string& device, std::size_t bytes, bool shared, int cqe, unsigned access)
        : v(verbs::Verbs::load(library)),
          context(verbs::open_device(v, device)),
          memory(bytes, shared) {
        pd = v->alloc_pd(context.get());
        cq = v->create_cq(context.get(), cqe, nullptr, nullptr, 0);
        mr = v->reg_mr(pd, memory.data(), bytes, static_cast<int>(access));
    }
    DeviceEnd(const DeviceEnd&) = delete;
    DeviceEnd& operator=(const DeviceEnd&) = delete;

    [[nodiscard]] std::optional<ibv_wc> poll(double seconds = 30) const {
        const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9);
        ibv_wc wc{};
        do {
            if (ibv_poll_cq(cq, 1, &wc) > 0) return wc;
            std::this_thread::yield();
        } while (monotonic_ns() < deadline);
        return std::nullopt;
    }

    // The next asynchronous event of the device.
    [[nodiscard]] std::optional<ibv_event_type> event() const {
        pollfd wait{context->async_fd, POLLIN, 0};
        ibv_async_event e{};
        if (::poll(&wait, 1, 30'000) <= 0 || v->get_async_event(context.get(), &e) != 0) {
            return std::nullopt;
        }
        v->ack_async_event(&e);
        return e.event_type;
    }

    std::shared_ptr<const verbs::Verbs> v;
    std::shared_ptr<ibv_context> context;
    Memory memory;
    ibv_pd* pd;
    ibv_cq* cq;
    ibv_mr* mr;

  protected:
    // Once the queue pair is gone.
    ~DeviceEnd() {
        if (mr != nullptr) v->dereg_mr(mr);
        v->destroy_cq(cq);
        v->dealloc_pd(pd);
    }
    int set_state(ibv_qp* qp, ibv_qp_state state) const {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        return v->modify_qp(qp, &attr, IBV_QP_STATE);
    }
    // The next completion is this one.
    bool completes(const ibv_qp* qp, std::uint64_t id, ibv_wc_status status) const {
        const auto wc = poll();
        if (wc && wc->wr_id == id && wc->status == status && wc->qp_num == qp->qp_num) return true;
        std::printf("  expected wr_id %llu %s, got %llu %s\n", static_cast<unsigned long long>(id),
                    verbs::status_name(status),
                    wc ? static_cast<unsigned long long>(wc->wr_id) : 0ull,
                    wc ? verbs::status_name(wc->status) : "nothing");
        return false;
    }
};

}  // namespace mkernel::nics::testing
