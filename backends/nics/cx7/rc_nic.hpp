// The RC backend (ConnectX on InfiniBand or RoCE v2; any verbs device that has RC): one queue pair
// per peer, a put is RDMA writes of which the last carries the signal as its immediate.
//
// Ordering: RC executes the writes of one QP in order and completes the receive of an immediate
// after the data of its own and all earlier writes is placed. MRs are registered without relaxed
// ordering.
//
// Queue bounds: at most `queue_depth` sends are posted and not known complete per QP; every chain
// handed to the NIC ends in a signaled request, so completions always come. Each immediate consumes
// one of kReceives empty receives, posted again in batches as they are used.
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

namespace mkernel::nics::cx7 {

struct Options {
    std::uint32_t queue_depth = 128;
    std::uint8_t qp_timeout = 14;  // 4.096 us * 2^this a try
    std::uint8_t retry_count = 6;
    std::uint8_t rnr_retry = 6;
    std::optional<int> gid_index;
    std::uint8_t port = 1;
};

class RcNic final : public Nic {
  public:
    static constexpr std::uint32_t kReceives = 4096;
    static constexpr std::uint32_t kChain = 32;
    static constexpr std::uint32_t kPeersPerQueue = 16;  // QPs that share a completion queue
    static constexpr std::uint32_t kMaxPeers = 1u << 20;
    // Receiver-not-ready timer code 24: 40.96 ms, so that six retries outlast a host that is late.
    static constexpr std::uint8_t kRnrTimer = 24;

    // Throws SetupError.
    RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& device,
          const Options& options);
    ~RcNic() override;

    Endpoint add_peer(std::uint32_t peer) override;
    void connect(std::uint32_t peer, const Endpoint& remote) override;
    Capabilities capabilities() const override;
    RemoteKey register_memory(std::uint32_t region, std::uint64_t address,
                              std::uint64_t bytes) override;
    void bind(std::uint32_t region, std::uint32_t peer, const RemoteKey& key) override;
    void inject_failure(std::uint32_t peer) override;
    PutResult put(const PutCommand& command, PutCursor& cursor) override;
    void ring() override;
    int poll(SignalSink& sink) override;
    void mark() override;
    bool reached_mark() const override;
    void arm() override;
    std::span<const int> descriptors() const override { return descriptors_; }
    void settle() override;
    void close() override;

  private:
    struct Peer;
    struct LocalRegion {
        std::shared_ptr<ibv_mr> mr;
        std::uint64_t address = 0;
        std::uint64_t bytes = 0;
        std::uint32_t lkey = 0;
        std::atomic<bool> ready{false};
    };

    std::shared_ptr<ibv_cq> queue_for_next_peer();
    Peer& peer_at(std::uint32_t peer, const char* what);
    std::uint32_t free_slots(const Peer& peer) const;
    bool check(const PutCommand& command);
    void stage(Peer& peer, const ibv_send_wr& wr, const ibv_sge& sge);
    void flush_chain(Peer& peer);
    void post_receives(Peer& peer, std::uint32_t count);
    void complete(const ibv_wc& wc, SignalSink& sink);
    void report(const ibv_wc& wc);
    void read_events();
    void reject(const PutCommand& command, const std::string& why);

    std::shared_ptr<const verbs::Verbs> verbs_;
    std::string device_;
    Options options_;
    std::shared_ptr<ibv_context> context_;
    std::shared_ptr<ibv_pd> pd_;
    std::shared_ptr<ibv_comp_channel> channel_;
    ibv_port_attr port_{};
    ibv_device_attr limits_{};
    ::ibv_gid gid_{};
    int gid_index_ = 0;
    std::uint32_t receives_ = kReceives;
    std::uint32_t max_inline_ = 0;
    std::vector<std::shared_ptr<ibv_cq>> queues_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where not connected
    std::vector<Peer*> ready_;                  // peers with staged requests
    std::vector<Peer*> owing_;                  // peers whose receives want posting again
    std::unique_ptr<LocalRegion[]> regions_;
    std::array<int, 2> descriptors_{-1, -1};
    std::optional<ibv_wc> flushed_;  // a flush seen before its cause
    std::uint32_t polls_ = 0;
    std::uint32_t peer_count_ = 0;
};

}  // namespace mkernel::nics::cx7
