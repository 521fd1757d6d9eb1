// An opened device: its port, its objects, and the engine thread that does what the card does.
//
// `control` guards the tables and, held by the engine during a round, the user memory it touches.
// Control calls announce themselves in `control_waiting`, and the engine lets them go first.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backends/nics/softverbs/config.hpp"
#include "backends/nics/softverbs/fabric.hpp"
#include "backends/nics/softverbs/faults.hpp"
#include "backends/nics/softverbs/link.hpp"
#include "backends/nics/softverbs/memory.hpp"
#include "backends/nics/softverbs/port.hpp"
#include "backends/nics/softverbs/queue_pair.hpp"

namespace mkernel::nics::softverbs {

// Holds the control lock from outside the engine.
class Control {
  public:
    explicit Control(Context& context);

  private:
    std::unique_lock<std::mutex> lock_;
};

struct Context : verbs_context {
    // Throws std::system_error.
    explicit Context(ibv_device* device);
    ~Context();

    static Context& of(ibv_context* context) {
        return *static_cast<Context*>(verbs_get_ctx(context));
    }

    // Under the control lock.
    Qp* create_qp(const ibv_qp_init_attr& init);
    void destroy_qp(Qp* qp);
    std::shared_ptr<RemotePort> connect(const PortAddress& address);

    // Engine, or under the control lock.
    void raise_event(ibv_event_type type, ibv_qp* qp, ibv_cq* cq);
    // Adds a completion. False where it overruns the queue, which is an event, once.
    bool complete(ibv_cq* queue, const Cq::Entry& entry);

    void wake() { ring_doorbell(port.header()); }

    // What falls on the message that is about to go to that completion queue. An overflow is done here,
    // the rest is the queue pair's to do.
    struct Struck {
        bool drop = false, overflow = false, qp_error = false;
    };
    Struck strike(Cq& queue, std::uint64_t now);
    // Whether a cut of the link is on, or a stall of the device. Engine, or under the control lock.
    bool mute(std::uint64_t now);

    Config config;
    Faults faults{config.faults, now_ns()};
    Link link{config};
    LocalPort port;
    std::mutex control;
    std::atomic<int> control_waiting{0};
    MrTable regions;
    std::vector<std::unique_ptr<Qp>> qps;
    std::mt19937_64 random{config.seed};  // engine
    Fabric fabric{*this};                 // SRD
    Fd async_write;
    Fd async_read;

  private:
    void run();
    void sleep();
    bool round(std::uint64_t& wake_at);

    std::unordered_map<std::uint64_t, std::weak_ptr<RemotePort>> remotes_;  // by cookie
    std::uint32_t next_ring_ = 0;
    std::uint32_t generation_ = 1;
    std::atomic<bool> stop_{false};
    std::thread engine_;
};

}  // namespace mkernel::nics::softverbs
