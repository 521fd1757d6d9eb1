// One rank's opened NIC with its command FIFO and proxy, for any backend; the Python session drives it.
//
// Calls come from one thread at a time, except put, flush, statistics and failure, which any thread may make
// between start and close.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backends/nics/nic.hpp"
#include "backends/nics/proxy.hpp"
#include "backends/transport/fifo.hpp"

namespace mkernel::nics {

class Session {
  public:
    Session(std::unique_ptr<Nic> nic, std::uint64_t fifo_slots);
    ~Session();

    // Returns the opened NIC. Throws SetupError after close.
    Nic& nic() const;

    // `pad` is the address of this rank's signal pad.
    void start(std::uint64_t pad, const std::vector<int>& cpus);
    [[nodiscard]] bool started() const { return proxy_ != nullptr; }

    // Returns the address of the `FifoHandle`.
    [[nodiscard]] std::uint64_t fifo() const;

    // Deregisters a region once every put queued before is complete here, and forgets the peers' part of it.
    // Its number may be used again. Puts of other regions go on. A put of it that is queued after this call
    // began is refused, as INVALID_PUT; peers must have stopped putting to it. Returns false where the puts
    // did not end by then: the region is closed to puts, and still registered.
    bool deregister(std::uint32_t region, double timeout_s);

    transport::WaitResult put(const transport::PutCommand& command, double timeout_s);
    bool flush(double timeout_s);
    [[nodiscard]] ProxyStatistics statistics() const;
    // After close, return the values from before it.
    [[nodiscard]] Registrations registrations() const { return nic_->registrations(); }
    [[nodiscard]] std::vector<LaneCounts> lanes() const { return nic_->lanes(); }
    [[nodiscard]] std::optional<Failure> failure() const;
    void close();

  private:
    std::unique_ptr<Nic> nic_;
    transport::Fifo fifo_;
    transport::SignalPad pad_;
    std::unique_ptr<Proxy> proxy_;
    bool closed_ = false;
    // Kept from before close.
    ProxyStatistics last_statistics_;
};

}  // namespace mkernel::nics
