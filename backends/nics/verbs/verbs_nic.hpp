// What the backends on verbs have in common: the opened device, its memory, completion queues,
// receives, failures and events. A backend adds its queue pairs and how a put becomes requests.
//
// wr_id: bit 63 receive; bits 62..40 peer rank; bits 39..0 number of the request on its QP. It is
// all that an error completion reliably tells beside its status.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/nics/nic.hpp"
#include "backends/nics/verbs/loader.hpp"

namespace mkernel::nics::verbs {

struct DeviceOptions {
    std::uint32_t queue_depth = 128;
    std::uint8_t rnr_retry = 6;
    std::optional<int> gid_index;
    std::uint8_t port = 1;
};

std::uint64_t make_wr_id(bool receive, std::uint32_t peer, std::uint64_t number);
// An errno, in words.
std::string reason(int error);

class VerbsNic : public Nic {
  public:
    static constexpr std::uint32_t kReceives = 4096;
    static constexpr std::uint32_t kChain = 32;
    static constexpr std::uint32_t kPeersPerQueue = 16;  // QPs that share a completion queue
    static constexpr std::uint32_t kMaxPeers = 1u << 20;

    ~VerbsNic() override;
    RemoteKey register_memory(std::uint32_t region, std::uint64_t address,
                              std::uint64_t bytes) override;
    void bind(std::uint32_t region, std::uint32_t peer, const RemoteKey& key) override;
    void inject_failure(std::uint32_t peer) override;
    void ring() override;
    int poll(SignalSink& sink) override;
    void mark() override;
    bool reached_mark() const override;
    void arm() override;
    std::span<const int> descriptors() const override { return descriptors_; }
    void settle() override;
    void close() override;

  protected:
    struct RemoteRegion {
        RemoteKey key;
        std::atomic<bool> bound{false};
    };
    struct Peer {
        virtual ~Peer() = default;
        std::uint32_t rank = 0;
        std::shared_ptr<ibv_qp> qp;
        std::shared_ptr<ibv_cq> queue;
        bool connected = false;
        std::uint64_t posted = 0;     // requests staged or posted, ever
        std::uint64_t completed = 0;  // all up to this one are known complete
        std::uint64_t marked = 0;
        bool listed_ready = false;
        std::uint32_t owed = 0;  // receives used and not posted again
        bool listed_owing = false;
        std::array<ibv_recv_wr, kChain> receives{};
        std::unique_ptr<RemoteRegion[]> regions{new RemoteRegion[kMaxRegions]};
    };
    struct LocalRegion {
        std::shared_ptr<ibv_mr> mr;
        std::uint64_t address = 0;
        std::uint64_t bytes = 0;
        std::uint32_t lkey = 0;
        std::atomic<bool> ready{false};
    };

    // Throws SetupError.
    VerbsNic(std::shared_ptr<const Verbs> verbs, const std::string& device,
             const DeviceOptions& options);

    // Gives a new peer its completion queue; then takes it in.
    void prepare(Peer& peer, std::uint32_t rank);
    void adopt(std::unique_ptr<Peer> peer);
    void own(Peer& peer, ibv_qp* qp);
    Endpoint endpoint_of(const Peer& peer) const;
    // A peer with a queue pair; `what` wants it. SetupError.
    Peer& peer_at(std::uint32_t rank, const char* what);
    ::ibv_gid remote_gid(std::uint32_t rank, const Endpoint& remote) const;

    bool check(const PutCommand& command, std::uint32_t max_signal, std::uint32_t max_value);
    std::uint32_t free_slots(const Peer& peer) const {
        return depth_ - static_cast<std::uint32_t>(peer.posted - peer.completed);
    }
    void list_ready(Peer& peer);
    void post_receives(Peer& peer, std::uint32_t count);
    void post_failed(const Peer& peer, std::uint64_t wr_id, int error, const char* call);
    void bad_signal(const ibv_wc& wc, std::uint32_t rank, std::uint32_t signal);

    // Of a backend: hands what is staged for a peer to the NIC (false: its queue is full, and all of
    // it stays staged); a request is complete; an immediate has arrived.
    virtual bool hand_over(Peer& peer) = 0;
    virtual void sent(Peer& peer, std::uint64_t number) = 0;
    virtual void arrived(Peer& peer, const ibv_wc& wc, SignalSink& sink) = 0;

    std::shared_ptr<const Verbs> verbs_;
    std::string device_;
    std::uint32_t depth_;
    std::uint32_t receives_ = kReceives;
    std::uint8_t port_number_;
    std::shared_ptr<ibv_context> context_;
    std::shared_ptr<ibv_pd> pd_;
    std::shared_ptr<ibv_comp_channel> channel_;
    ibv_port_attr port_{};
    ibv_device_attr limits_{};
    ::ibv_gid gid_{};
    int gid_index_ = 0;
    std::uint32_t max_inline_ = 0;
    ibv_sge* receive_piece_ = nullptr;  // of every receive; null: it has none
    std::unique_ptr<LocalRegion[]> regions_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where not connected

  private:
    std::shared_ptr<ibv_cq> queue_for_next_peer();
    void reject(const PutCommand& command, const std::string& why);
    void complete(const ibv_wc& wc, SignalSink& sink);
    void report(const ibv_wc& wc);
    void read_events();

    std::vector<std::shared_ptr<ibv_cq>> queues_;
    std::vector<Peer*> ready_;  // peers with staged requests
    std::vector<Peer*> owing_;  // peers whose receives want posting again
    std::array<int, 2> descriptors_{-1, -1};
    std::optional<ibv_wc> flushed_;  // a flush seen before its cause
    std::uint32_t polls_ = 0;
    std::uint32_t peer_count_ = 0;
};

}  // namespace mkernel::nics::verbs
