// A NIC that has nothing to do, for tests of the proxy, which say what becomes of puts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/nics/nic.hpp"

namespace mkernel::nics::testing {

class IdleNic : public Nic {
  public:
    Capabilities capabilities() const override { return {}; }
    std::vector<Endpoint> add_peer(std::uint32_t, std::span<const std::uint32_t>) override {
        return {};
    }
    void connect(std::uint32_t, const std::vector<Endpoint>&) override {}
    RemoteKey register_memory(std::uint32_t, const LocalMemory&) override { return {}; }
    void bind(std::uint32_t, std::uint32_t, const RemoteKey&) override {}
    void withdraw(std::uint32_t) override {}
    void deregister_memory(std::uint32_t) override {}
    Registrations registrations() const override { return {}; }
    std::vector<LaneCounts> lanes() const override { return {}; }
    void inject_failure(std::uint32_t) override {}
    void ring() override {}
    int poll(SignalSink&) override { return 0; }
    void mark(std::uint32_t) override {}
    bool reached_mark(std::uint32_t) const override { return true; }
    void arm() override {}
    std::span<const int> descriptors() const override { return {}; }
    void settle() override {}
    void close() override {}
};

}  // namespace mkernel::nics::testing
