// The SRD backend (AWS EFA): queue pairs addressed by handle, number and key.
//
// Ordering: SRD has none. Each data write of a put with a signal carries an immediate, which is
// counted at the receiver; the signal is raised once every message of the put has come. Signals of
// several puts may therefore come in any order.
//
// Queue bounds: every request is signaled; requests complete in any order, and the window of those
// posted since the oldest incomplete one is at most `queue_depth`. Where the provider returns ENOMEM all the
// same, the batch stays staged and goes with a later ring().
//
// Immediates use receives on every device. Newer ones could be set not to (UNSOLICITED_WRITE_RECV), which
// would save their posting again and let a slow receiver's completion queue overflow.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/nics/verbs/efadv.hpp"
#include "backends/nics/verbs/verbs_nic.hpp"

namespace mkernel::nics::efa {

// Returns the attributes of an EFA device. Throws SetupError: it is none.
efadv_device_attr query(const verbs::Efadv& efa, ibv_context* context, const std::string& device);

class SrdNic final : public verbs::VerbsNic {
  public:
    // `library`: where efadv_* are. Throws SetupError, LoadError.
    SrdNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& library,
           const std::vector<verbs::PortName>& ports, const verbs::Options& options);
    ~SrdNic() override;

  private:
    struct Staged;
    struct SrdLane;
    std::unique_ptr<Lane> new_lane() override;
    void open(Lane& lane, Endpoint& mine) override;
    void join(Lane& lane, const Endpoint& remote) override;
    bool stage(Lane& lane, const Write& write) override;
    bool hand_over(Lane& lane) override;
    void sent(Lane& lane, std::uint64_t number) override;

    const verbs::Efadv efa_;
    bool bounded_rnr_ = true;  // every rail can be told how often to retry
};

}  // namespace mkernel::nics::efa
