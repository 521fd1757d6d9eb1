// An opened device: its port, its objects, and the engine thread that does the work of a card.
//
// `control` guards the tables and, held by the engine during a round, the user memory it touches. Control
// calls announce themselves in `control_waiting`, and the engine lets them go first.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>
#include <deque>
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

// The holder of the control lock outside the engine.
class Control {
  public:
    explicit Control(Context& context);

  private:
    std::unique_lock<std::mutex> lock_;
};

// The place of a payload: in memory of this process, or at an address of the mover. Neither: out of reach.
struct PayloadSource {
    const std::byte* host = nullptr;
    std::uint64_t device = 0;
    [[nodiscard]] bool reached() const { return host != nullptr || device != 0; }
};

struct Context : verbs_context {
    // Throws std::system_error.
    explicit Context(ibv_device* device);
    ~Context();

    static Context& of(ibv_context* context) {
        return *static_cast<Context*>(verbs_get_ctx(context));
    }

    // Called under the control lock.
    Qp* create_qp(const ibv_qp_init_attr& init);
    void destroy_qp(Qp* qp);
    std::shared_ptr<RemotePort> connect(const PortAddress& address);

    // Called by the engine, or under the control lock.
    void raise_event(ibv_event_type type, ibv_qp* qp, ibv_cq* cq);
    // Adds a completion. Returns false where it overruns the queue, which is an event, once.
    bool complete(ibv_cq* queue, const Cq::Entry& entry);
    // Makes all added completions visible to pollers: at the end of a round, and before a peer is notified
    // that the work they report has been done.
    void show_completions();

    void wake() { ring_doorbell(port.header()); }

    enum class Placed { now, later, busy };
    // Starts copies between devices of bytes that arrive later, in as large batches as there is time for: no
    // observer can see when a copy was made, only when it is reported to have arrived. Null: not now, or not
    // ahead.
    std::optional<DeviceCopies::Batch> place_ahead(const Mr& mr, std::uint64_t address,
                                                   const PayloadSource& from, std::size_t bytes,
                                                   std::uint64_t arrival);
    // Writes bytes that arrived. `batch`: the copy's, where the bytes are there later; `due`: see
    // DeviceCopies.
    Placed place(const Mr& mr, std::uint64_t address, const PayloadSource& from, std::size_t bytes,
                 DeviceCopies::Batch& batch, std::uint64_t due = 0);
    // Returns bytes of device memory, read at once; empty where that failed.
    std::vector<std::byte> fetch(std::uint64_t address, std::size_t bytes);
    // Returns where the payload is that a packet of `from` refers to.
    PayloadSource find_payload(RemotePort& from, std::uint8_t flags, std::int32_t fd,
                               std::uint64_t file, std::uint64_t offset, std::uint32_t length);
    // Returns true once a peer has been sent everything that it must know of device memory here; tries to
    // send it.
    bool told(RemotePort& remote);
    void offer(const Mr& mr);
    void withdraw(const Mr& mr);
    // Shows the bytes that Config::unflushed held back.
    void show_unflushed();

    // The faults that fall on the next message to that completion queue. An overflow is done here, the rest
    // is done by the queue pair.
    struct Struck {
        bool drop = false, overflow = false, qp_error = false;
    };
    Struck strike(Cq& queue, std::uint64_t now);
    // Returns true while a cut of the link, or a stall of the device, is on. Engine, or under the control
    // lock.
    bool mute(std::uint64_t now);
    // Announces that a thread polls on and on, so that there will be work soon. Any thread.
    void await();

    Config config;
    Faults faults{config.faults, now_ns()};
    Link link{config};
    LocalPort port;
    std::mutex control;
    std::atomic<int> control_waiting{0};
    MrTable regions;
    DeviceCopies copies;
    Offers offers{port.address()};
    std::vector<std::unique_ptr<Qp>> qps;
    std::mt19937_64 random{config.seed};  // engine
    Fabric fabric{*this};                 // SRD
    Fd async_write;
    Fd async_read;

  private:
    void run();
    void sleep();
    [[nodiscard]] bool lingers();
    bool round(std::uint64_t& wake_at);
    void forget_expired();
    bool exchange_offers();

    struct Remote {
        std::weak_ptr<RemotePort> port;
        std::deque<std::pair<Offers::Message, std::shared_ptr<const Fd>>> outbox;
    };
    void tell(Remote& remote, const Mr& mr, std::uint64_t length);
    bool flush(Remote& remote);
    struct UnshownBytes {
        std::uint32_t rkey;
        std::uint64_t address;
        std::vector<std::byte> bytes;
        std::uint64_t until;  // UINT64_MAX: a flush
    };
    void show_bytes(std::uint64_t now);

    std::unordered_map<std::uint64_t, Remote> remotes_;  // by cookie
    std::vector<const Mr*> device_regions_;
    std::atomic<bool> has_device_regions_{false};
    std::vector<Cq*> unshown_;     // queues with completions that nobody sees yet, in any number
    std::uint64_t worked_at_ = 0;  // engine
    std::atomic<std::uint64_t> awaited_{0};
    std::uint64_t awaited_seen_ = 0;          // engine
    std::deque<UnshownBytes> unshown_bytes_;  // that have arrived, in their order
    std::uint32_t offers_seen_ = 0;
    bool told_all_ = true;         // no outbox holds anything
    bool failure_raised_ = false;  // of the mover
    // Goes to the next ring. Queue pairs get rings in turn; each turn is a generation of their numbers.
    void to_next_ring();
    std::uint32_t next_ring_ = 0;
    std::uint32_t generation_ = 1;
    std::atomic<bool> stop_{false};
    std::thread engine_;
};

}  // namespace mkernel::nics::softverbs
