// A NIC without a network, for tests of the FIFO and the proxy: it counts and checks the commands that it
// is given, and raises their signals here.
#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <vector>

#include "backends/nics/nic.hpp"

namespace mkernel::nics::testing {

class CountingNic final : public Nic {
  public:
    // `checked` sees every command, on the proxy's thread; false: it is wrong.
    explicit CountingNic(std::function<bool(const transport::PutCommand&)> checked = {})
        : checked_(std::move(checked)) {}

    [[nodiscard]] std::uint64_t taken() const { return taken_.load(std::memory_order_acquire); }
    [[nodiscard]] std::uint64_t wrong() const { return wrong_.load(std::memory_order_acquire); }

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
    PutResult put(const transport::PutCommand& command, PutCursor&) override {
        if (checked_ && !checked_(command)) wrong_.fetch_add(1, std::memory_order_relaxed);
        if (command.signal != transport::PutCommand::kNoSignal) raised_.push_back(command);
        taken_.fetch_add(1, std::memory_order_release);
        return PutResult::done;
    }
    void ring() override {}
    int poll(SignalSink& sink) override {
        for (const auto& each : raised_) sink.raise(each.peer, each.signal, each.value);
        const int count = static_cast<int>(raised_.size());
        raised_.clear();
        return count;
    }
    void mark() override {}
    bool reached_mark() const override { return true; }
    void arm() override {}
    std::span<const int> descriptors() const override { return {}; }
    void settle() override {}
    void close() override {}

  private:
    std::function<bool(const transport::PutCommand&)> checked_;
    std::vector<transport::PutCommand> raised_;
    std::atomic<std::uint64_t> taken_{0};
    std::atomic<std::uint64_t> wrong_{0};
};

}  // namespace mkernel::nics::testing
