// The SRD backend (AWS EFA): one queue pair per peer, addressed by handle, number and key.
//
// Ordering: SRD has none. Each data write of a put with a signal carries an immediate, which is
// counted at the receiver; the signal is raised once every message of the put has come. Signals of
// several puts may therefore come in any order. See immediate.hpp.
//
// Queue bounds: every request is signaled; requests complete in any order, and the window of those
// posted since the oldest incomplete one is at most `queue_depth`. Where the provider says ENOMEM
// all the same, the batch stays staged and goes with a later ring().
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "backends/nics/verbs/efadv.hpp"
#include "backends/nics/verbs/verbs_nic.hpp"

namespace mkernel::nics::efa {

class SrdNic final : public verbs::VerbsNic {
  public:
    // `library`: where efadv_* are. Throws SetupError, LoadError.
    SrdNic(std::shared_ptr<const verbs::Verbs> verbs, const std::string& library,
           const std::string& device, const verbs::DeviceOptions& options);
    ~SrdNic() override;

    Endpoint add_peer(std::uint32_t peer) override;
    void connect(std::uint32_t peer, const Endpoint& remote) override;
    Capabilities capabilities() const override;
    PutResult put(const PutCommand& command, PutCursor& cursor) override;
    void close() override;

  private:
    struct SrdPeer;
    struct Write {
        std::uint64_t wr_id = 0;
        ibv_sge source{};
        std::uint64_t remote_addr = 0;
        std::uint32_t rkey = 0;
        std::uint32_t immediate = 0;
        bool told = false;  // carries the immediate
    };

    bool stage(SrdPeer& peer, Write write);
    bool hand_over(Peer& peer) override;
    void sent(Peer& peer, std::uint64_t number) override;
    void arrived(Peer& peer, const ibv_wc& wc, SignalSink& sink) override;

    std::shared_ptr<const verbs::Efadv> efa_;
    efadv_device_attr attributes_{};
    std::uint8_t rnr_retry_;
    std::uint64_t max_rdma_ = 0;
    // What receives point at, for they need a piece; immediates bring no bytes.
    std::array<std::uint64_t, 512> landing_{};
    std::shared_ptr<ibv_mr> landing_mr_;
    ibv_sge landing_piece_{};
};

}  // namespace mkernel::nics::efa
