// The common part of the backends on verbs: rails, peers with their lanes, memory, the way from puts to
// messages and from these to signals, credits, failures and events. A backend adds how a queue pair is made
// and how it is posted to.
//
// Lanes. A peer is reached over the queue pairs that add_peer made for it; each is a *lane*. Lane i
// of one side is joined to lane i of the other. A put of `stripe_bytes` or more is spread: every
// lane carries its share. A smaller one takes one lane, in turns. So there is no order between puts
// where there are several lanes.
//
// Signals. A put of one message carries its signal as that message's immediate; so does one of
// several messages on a lane that keeps order, with the last. Every other put is a group, whose immediates
// are counted at the receiver: see immediate.hpp and arrivals.hpp.
//
// Credits. An immediate takes a receive at the peer. Each end reports to the other how many of its receives a
// lane has used and posted again, by a plain write of that number into the sender's memory; a sender keeps
// back messages for which the peer has no receive. So however late a receiver looks, it is never without a
// receive (RNR), and its completion queue never overflows.
//
// The following holds in every interleaving of both ranks and the network, and is tried in them with this
// code (tests/native/model/test_put_model.cpp), on one queue pair and on several, RC and SRD:
//   whole       a peer that sees a put's signal sees all of its bytes
//   once        a put raises its signal once, by its value
//   complete    once a mark is reached, nothing reads or sends bytes put before it any more
//   room        no immediate comes where no receive is posted, and no completion queue overflows
//   apart       the messages of two groups of one number are never taken for one group
//   ends        no put waits for something that does not come
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/nics/nic.hpp"
#include "backends/nics/verbs/arrivals.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "backends/nics/verbs/rail.hpp"
#include "backends/nics/verbs/registration.hpp"
#include "backends/nics/verbs/wr_id.hpp"

namespace mkernel::nics::verbs {

struct Options {
    std::uint32_t queue_depth = 128;     // requests in flight on a queue pair
    std::uint32_t receive_depth = 4096;  // receives posted on a queue pair
    std::uint64_t stripe_bytes = 256 << 10;
    std::uint8_t rnr_retry = 6;
    // The rest applies to RC alone.
    std::uint8_t qp_timeout = 14;  // 4.096 us * 2^this a try
    std::uint8_t retry_count = 6;
    std::uint8_t traffic_class = 0;  // of the packets' global route header
    std::uint8_t service_level = 0;
    std::optional<int> gid_index{};
    bool peermem = false;  // the kernel module is loaded; see registration.hpp
};

class VerbsNic : public Nic {
  public:
    static constexpr std::uint32_t kChain = 32;
    static constexpr std::uint32_t kReach =
        16;  // depths between a request and the oldest in flight
    static constexpr std::uint32_t kMaxRails = 8;
    static constexpr std::size_t kMaxFlushes = 8;  // devices that need one
    static_assert(2 * kMaxRails <= kMaxDescriptors);

    ~VerbsNic() override;
    std::vector<Endpoint> add_peer(std::uint32_t peer,
                                   std::span<const std::uint32_t> rails) override;
    void connect(std::uint32_t peer, const std::vector<Endpoint>& remote) override;
    RemoteKey register_memory(std::uint32_t region, const LocalMemory& memory) override;
    void bind(std::uint32_t region, std::uint32_t peer, const RemoteKey& key) override;
    void withdraw(std::uint32_t region) override;
    void deregister_memory(std::uint32_t region) override;
    Registrations registrations() const override;
    std::vector<LaneCounts> lanes() const override;
    void inject_failure(std::uint32_t peer) override;
    Capabilities capabilities() const override;
    PutResult put(const transport::PutCommand& command, PutCursor& cursor) override;
    void ring() override;
    int poll(SignalSink& sink) override;
    void mark(std::uint32_t number) override;
    bool reached_mark(std::uint32_t number) const override;
    void arm() override;
    std::span<const int> descriptors() const override { return descriptors_; }
    void settle() override;
    void close() override;

  protected:
    // Words of a lane that the NIC reads and writes; each has a cache line.
    struct Words {
        alignas(64) std::uint64_t taken_there = 0;  // the peer writes it: see Credits
        alignas(64) std::uint64_t taken_here = 0;   // what is written to the peer
        alignas(64) std::uint64_t landing = 0;      // receives point here; nothing ever comes
    };
    // LaneCounts that the proxy thread alone writes; they outlive the lane.
    struct Counts {
        std::uint32_t peer = 0;
        std::uint32_t lane = 0;
        std::uint32_t rail = 0;
        std::atomic<std::uint64_t> messages{0};
        std::atomic<std::uint64_t> bytes{0};
    };
    struct Lane {
        virtual ~Lane() = default;
        std::uint32_t rank = 0;  // of the peer
        std::uint32_t number = 0;
        std::uint32_t rail = 0;
        std::uint32_t remote_rail = 0;
        std::shared_ptr<ibv_cq> queue;
        std::shared_ptr<ibv_qp> qp;
        std::uint64_t posted = 0;     // requests staged or posted, ever
        std::uint64_t completed = 0;  // all up to this one are known complete,
        std::uint64_t ended = 0;  // and so many in all, of which later ones may have overtaken it
        bool listed_ready = false;
        Counts* counts = nullptr;

        std::uint64_t told = 0;     // immediates staged, ever
        std::uint64_t allowed = 0;  // how many the peer is known to have room for
        std::uint64_t remote_receives = 0;
        std::uint64_t remote_word = 0;  // address and key of the peer's taken_there
        std::uint32_t remote_word_key = 0;

        std::uint32_t owed = 0;        // receives used and not posted again
        std::uint64_t taken = 0;       // receives used and posted again
        std::uint64_t taken_told = 0;  // of these, what the peer was told
        std::uint64_t told_by = 0;     // number of the request that told it
        bool listed_owing = false;
        Words* words = nullptr;
        std::uint32_t words_key = 0;
        ibv_sge landing{};
        std::array<std::uint64_t, kMarks> marked{};    // `posted` at each mark
        std::array<std::uint64_t, kGroups> last_of{};  // last request of each group's last use
        std::array<ibv_recv_wr, kChain> receives{};
    };
    // An RDMA write. Without bytes it only brings its immediate.
    struct Write {
        ibv_sge source{};
        std::uint64_t remote_addr = 0;
        std::uint32_t rkey = 0;
        std::uint32_t immediate = 0;
        bool told = false;    // carries the immediate
        bool device = false;  // the source is a device's memory, which the CPU cannot read
    };
    // The traits in which kinds of queue pairs differ.
    struct Traits {
        bool in_order = false;           // a queue pair executes writes in order
        bool receives_have_sge = false;  // a receive must name a piece of memory
    };

    // Throws SetupError.
    VerbsNic(std::shared_ptr<const Verbs> verbs, const std::vector<PortName>& ports,
             const Options& options, Traits traits);

    [[nodiscard]] const Rail& rail_of(const Lane& lane) const { return *rails_[lane.rail]; }
    // Returns the free slots of a lane. One request that is late does not hold up those after it, as far as
    // numbers reach.
    [[nodiscard]] std::uint32_t free_slots(const Lane& lane) const {
        return static_cast<std::uint32_t>(std::min(depth_ - (lane.posted - lane.ended),
                                                   reach() - (lane.posted - lane.completed)));
    }
    [[nodiscard]] std::uint64_t reach() const { return std::uint64_t{kReach} * depth_; }
    void list_ready(Lane& lane);
    void post_failed(const Lane& lane, std::uint64_t wr_id, int error, const char* call);

    // Each backend implements the following in its own way. new_lane() makes a lane. open() makes the lane's
    // queue pair, which must take receives when it returns, and fills in `mine.psn`. join() connects it.
    // SetupError.
    virtual std::unique_ptr<Lane> new_lane() = 0;
    virtual void open(Lane& lane, Endpoint& mine) = 0;
    virtual void join(Lane& lane, const Endpoint& remote) = 0;
    // stage() returns false where there is no room; then nothing is staged. hand_over() posts everything
    // staged to the NIC, or returns false where the NIC's queue is full; then all of it stays staged. sent()
    // is called when a request is complete.
    virtual bool stage(Lane& lane, const Write& write) = 0;
    virtual bool hand_over(Lane& lane) = 0;
    virtual void sent(Lane& lane, std::uint64_t number) = 0;

    std::shared_ptr<const Verbs> verbs_;
    const Options options_;
    std::vector<std::unique_ptr<Rail>> rails_;
    std::uint32_t depth_;
    std::uint32_t receives_;
    std::uint64_t max_message_;
    std::uint32_t max_inline_ = 0;

  private:
    struct RemoteRegion {
        std::uint64_t address = 0;
        std::uint64_t bytes = 0;
        std::array<std::uint32_t, kMaxRails> rkeys{};
        std::atomic<bool> bound{false};
    };
    struct LocalRegion {
        std::array<std::shared_ptr<ibv_mr>, kMaxRails> mrs;
        std::array<std::uint32_t, kMaxRails> lkeys{};
        std::uint64_t address = 0;
        std::uint64_t bytes = 0;
        Rung rung = Rung::host;
        std::atomic<bool> ready{false};
    };
    struct Peer {
        std::uint32_t rank = 0;
        std::uint32_t turn = 0;  // the lane that the next small put takes
        std::uint64_t groups_begun = 0;
        bool connected = false;
        std::unique_ptr<RemoteRegion[]> regions{new RemoteRegion[kMaxRegions]};
        std::optional<Arrivals> arrivals;
        std::unique_ptr<Words[]> words;
        std::vector<std::shared_ptr<ibv_mr>> words_mrs;  // by rail
        std::vector<std::unique_ptr<Lane>> lanes;        // last: their queue pairs go first
    };

    // Returns a peer with queue pairs; `what` names the caller in the error. SetupError.
    Peer& peer_at(std::uint32_t rank, const char* what);
    static void check_region(std::uint32_t region);
    void list_flush(const transport::DeviceFlush* flush);

    // data_path.cpp
    bool begin(const transport::PutCommand& command, Peer& peer, PutCursor& cursor);
    bool put_share(const transport::PutCommand& command, Peer& peer, PutCursor& cursor);
    bool room(Lane& lane, bool told) const;
    void post_receives(Lane& lane, std::uint32_t count);
    bool settle_receives(Lane& lane);
    void complete(const ibv_wc& wc, SignalSink& sink);
    void arrived(Lane& lane, const ibv_wc& wc, SignalSink& sink);
    bool make_visible();

    // failures.cpp
    bool check(const transport::PutCommand& command);
    void report(const ibv_wc& wc);
    void bad_arrival(const Lane& lane, const ibv_wc& wc, const std::string& what);
    void read_events();
    void read_event(const Rail& rail, const ibv_async_event& event);

    const Traits traits_;
    std::unique_ptr<LocalRegion[]> regions_;
    std::vector<std::unique_ptr<Peer>> peers_;    // by rank; null where there are no queue pairs
    std::atomic<std::uint64_t> registered_[3]{};  // by rung
    std::vector<Lane*> ready_;                    // lanes with staged requests
    std::vector<Lane*> owing_;                    // lanes whose receives, or credits, are due
    std::vector<int> descriptors_;
    // The flushes that regions need; null: no more.
    std::array<std::atomic<const transport::DeviceFlush*>, kMaxFlushes> device_flushes_{};
    bool visible_ = false;           // what the completions in hand announce
    std::optional<ibv_wc> flushed_;  // a flush seen before its cause
    std::uint32_t polls_ = 0;
    std::deque<Counts> counts_;                 // of all lanes, at addresses that stay
    std::atomic<std::uint32_t> most_lanes_{1};  // that a peer has
};

}  // namespace mkernel::nics::verbs
