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
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "backends/nics/verbs/verbs_nic.hpp"

namespace mkernel::nics::cx7 {

struct Options : verbs::DeviceOptions {
    std::uint8_t qp_timeout = 14;  // 4.096 us * 2^this a try
    std::uint8_t retry_count = 6;
};

class RcNic final : public verbs::VerbsNic {
  public:
    // Receiver-not-ready timer code 24: 40.96 ms, so that six retries outlast a host that is late.
    static constexpr std::uint8_t kRnrTimer = 24;

    // Throws SetupError.
    RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& device,
          const Options& options);

    Endpoint add_peer(std::uint32_t peer) override;
    void connect(std::uint32_t peer, const Endpoint& remote) override;
    Capabilities capabilities() const override;
    PutResult put(const PutCommand& command, PutCursor& cursor) override;

  private:
    struct RcPeer;
    void stage(RcPeer& peer, const ibv_send_wr& wr, const ibv_sge& sge);
    bool hand_over(Peer& peer) override;
    void sent(Peer& peer, std::uint64_t number) override;
    void arrived(Peer& peer, const ibv_wc& wc, SignalSink& sink) override;

    Options options_;
};

}  // namespace mkernel::nics::cx7
