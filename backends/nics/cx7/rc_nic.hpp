// The RC backend (ConnectX on InfiniBand or RoCE v2; any verbs device that has RC).
//
// Ordering: RC executes the writes of one queue pair in order and completes the receive of an
// immediate after the data of its own and all earlier writes is placed, so the last message of a put on a
// lane is enough to signal the receiver. Between queue pairs there is no order.
//
// Queue bounds: at most `queue_depth` sends are posted and not known complete per queue pair; every chain
// posted to the NIC ends in a signaled request, so completions always come.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backends/nics/verbs/verbs_nic.hpp"

namespace mkernel::nics::cx7 {

class RcNic final : public verbs::VerbsNic {
  public:
    // Receiver-not-ready timer code 24: 40.96 ms, so that six retries outlast a host that is late.
    static constexpr std::uint8_t kRnrTimer = 24;

    // Throws SetupError.
    RcNic(std::shared_ptr<const verbs::Verbs> verbs, const std::vector<verbs::PortName>& ports,
          const verbs::Options& options);

  private:
    struct RcLane;
    std::unique_ptr<Lane> new_lane() override;
    void open(Lane& lane, Endpoint& mine) override;
    void join(Lane& lane, const Endpoint& remote) override;
    bool stage(Lane& lane, const Write& write) override;
    bool hand_over(Lane& lane) override;
    void sent(Lane& lane, std::uint64_t number) override;

    std::uint32_t chain_limit_;
};

}  // namespace mkernel::nics::cx7
