// The fabric that carries the messages of SRD queue pairs between ports.
//
// It guarantees that a message arrives once and whole, or that its sender gets the reason. It guarantees no
// order: neither between messages, to one peer or to several, nor between the bytes of one message. Correct
// bytes may be placed twice, though never after the message's completion at either end. Both are drawn from a
// generator with a settable seed, at the receiver.
//
// An error concerns its message only; the queue pair goes on.
//
// Fabric::step is called by the engine, which holds the context's control lock; everything else under that
// lock.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "backends/nics/softverbs/device_memory.hpp"
#include "backends/nics/softverbs/flow.hpp"
#include "backends/nics/softverbs/port.hpp"
#include "backends/nics/softverbs/srd_qp.hpp"

namespace mkernel::nics::softverbs {

struct Context;

inline constexpr std::size_t kPlacements = 96;  // packets that wait for their turn to be placed,
inline constexpr std::size_t kDevicePlacements = 512;  // out of device memory: they bring no bytes

class Fabric {
  public:
    explicit Fabric(Context& context);
    ~Fabric();

    // Makes a queue pair, under the control lock. Null with errno.
    SrdQp* create_qp(const ibv_qp_init_attr_ex& init);
    void destroy_qp(SrdQp* qp);
    AddressHandle* create_ah(ibv_pd* pd, const PortAddress& address);
    void destroy_ah(AddressHandle* ah);
    // Forgets messages of a queue pair that broke or goes away: their answers are ignored.
    void forget(const SrdQp* qp);

    bool step(std::uint64_t now, std::uint64_t& wake_at);

  private:
    struct InFlight {
        bool busy = false;
        SrdQp* qp = nullptr;  // null: nobody waits for the answer
        std::uint64_t wr_id = 0;
        std::uint32_t total = 0;
    };
    struct Outgoing {
        PortAddress address;
        std::shared_ptr<RemotePort> remote;  // null: not reached yet
        std::uint32_t index = kMaxFlows;     // kMaxFlows: no flow claimed
        std::uint64_t word = 0;
        std::uint64_t head = 0, published = 0;
        std::uint64_t next = 0;      // number of the next message
        std::uint64_t answered = 0;  // of the log
        std::uint32_t waiting = 0;   // in flight
        std::uint64_t lost_at = 0;   // since when messages to the peer have been lost; 0: none is
        std::uint64_t quiet_at =
            0;  // since when the peer or our link has been silent; 0: it is not
        std::uint64_t tried_at = 0;
        bool dropped = false;                  // FaultKind::drop
        std::vector<std::uint64_t> abandoned;  // messages, to be told
        std::vector<InFlight> window{kFlowWindow};
    };
    struct Arriving {
        std::uint64_t number = UINT64_MAX;  // UINT64_MAX: the place is free
        FlowMessage message{};
        std::uint32_t taken = 0;        // bytes taken from the flow
        std::uint32_t outstanding = 0;  // placements still to do
        ibv_wc_status status = IBV_WC_SUCCESS;
        std::uint64_t rnr_since = 0;
    };
    struct Incoming {
        std::uint32_t index = 0;
        std::uint64_t word = 0;
        PortAddress from;
        std::shared_ptr<RemotePort> sender;
        std::uint64_t tail = 0;
        std::uint64_t answered = 0, shown = 0;      // in the log, and of these known to the sender
        std::vector<Arriving> window{kFlowWindow};  // as the sender's
        std::vector<std::uint64_t> unready;         // messages that want a receive
        EarlyCopies early;

        Arriving& place_of(std::uint64_t message) { return window[message % kFlowWindow]; }
    };
    struct Placement {
        Incoming* flow;
        FlowPacket packet;
        std::vector<std::byte> payload;
        std::uint64_t not_before;
        DeviceCopies::Batch batch;  // that was queued ahead; 0: none
        bool again = false;         // a second time
    };

    struct Moving {
        Incoming* flow;
        std::uint64_t message;
        DeviceCopies::Batch batch;
    };

    // Sending.
    Outgoing& outgoing(const PortAddress& address);
    static bool present(Outgoing& out, std::uint64_t now);
    bool reach(Outgoing& out, std::uint64_t now);
    bool send(SrdQp& qp, std::uint64_t now);
    bool begin(SrdQp& qp, const SrdRequest& request, Outgoing& out, std::uint64_t now);
    void abandon(SrdQp& qp);
    bool tell_abandoned(Outgoing& out);
    bool withstands_faults(SrdQp& qp, Outgoing& out, std::uint64_t now);
    bool give_up_held(SrdQp& qp, std::uint64_t now, std::uint64_t& wake_at);
    ibv_wc_status sound(const SrdQp& qp, const SrdRequest& request) const;
    bool transmit(SrdQp& qp, const SrdRequest& request, Outgoing& out, std::uint64_t now);
    std::byte* reserve(Outgoing& out, std::uint32_t bytes);
    void publish(Outgoing& out);
    bool take_answers(Outgoing& out);
    bool check_peer(Outgoing& out, std::uint64_t now, std::uint64_t& wake_at);
    void answer(Outgoing& out, InFlight& message, ibv_wc_status status, std::uint32_t vendor_err);
    void close(Outgoing& out);

    // Receiving.
    bool settle();
    void end_placement(Incoming& in, std::uint64_t message);
    void accept(std::uint64_t now);
    bool take(Incoming& in, std::uint64_t now, std::uint64_t& wake_at);
    void copy_ahead(Incoming& in, std::uint64_t head, std::uint64_t now);
    void give_up(Incoming& in, std::uint64_t message);
    bool place(std::uint64_t now, std::uint64_t& wake_at);
    // Executes a placement. Returns false where there is no room for a copy: it must come again.
    bool execute(Placement& placement, std::uint64_t now);
    // Returns the queue pair of that number that takes messages; null: none does, or none does any more.
    [[nodiscard]] SrdQp* receiver(std::uint32_t number) const;
    ibv_wc_status judge(const Incoming& in, const FlowPacket& packet) const;
    // Returns true where that queue pair may write so many bytes where the packet goes.
    bool may_write(const SrdQp& qp, const FlowPacket& packet, std::uint32_t bytes) const;
    void finish(Incoming& in, std::uint64_t message, Arriving& arriving);
    bool retry_unready(Incoming& in, std::uint64_t now, std::uint64_t& wake_at);
    void reply(Incoming& in, std::uint64_t message, ibv_wc_status status);
    void show_answers(Incoming& in);
    void drop(Incoming& in);

    Context& context_;
    std::unordered_map<std::uint32_t, std::unique_ptr<SrdQp>> qps_;
    std::vector<std::unique_ptr<AddressHandle>> handles_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Outgoing>> outgoing_;  // by cookie
    std::array<std::unique_ptr<Incoming>, kMaxFlows> incoming_;
    std::vector<Placement> placements_;
    std::vector<Moving> moving_;  // placements whose bytes are on their way
    std::mt19937_64 random_;
    std::uint32_t next_qpn_;
    std::uint64_t looked_at_ = 0;  // when the senders were last seen alive
};

}  // namespace mkernel::nics::softverbs
