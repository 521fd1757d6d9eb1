// A NIC without a network, for tests of the FIFO and the proxy: it counts and checks the commands that it
// is given, and raises their signals here.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "tests/native/nics/idle_nic.hpp"

namespace mkernel::nics::testing {

class CountingNic final : public IdleNic {
  public:
    // `checked` sees every command, on the proxy's thread; false: it is wrong.
    explicit CountingNic(std::function<bool(const transport::PutCommand&)> checked = {})
        : checked_(std::move(checked)) {}

    [[nodiscard]] std::uint64_t taken() const { return taken_.load(std::memory_order_acquire); }
    [[nodiscard]] std::uint64_t wrong() const { return wrong_.load(std::memory_order_acquire); }

    PutResult put(const transport::PutCommand& command, PutCursor&) override {
        if (checked_ && !checked_(command)) wrong_.fetch_add(1, std::memory_order_relaxed);
        if (command.signal != transport::PutCommand::kNoSignal) raised_.push_back(command);
        taken_.fetch_add(1, std::memory_order_release);
        return PutResult::done;
    }
    int poll(SignalSink& sink) override {
        for (const auto& each : raised_) sink.raise(each.peer, each.signal, each.value);
        const int count = static_cast<int>(raised_.size());
        raised_.clear();
        return count;
    }

  private:
    std::function<bool(const transport::PutCommand&)> checked_;
    std::vector<transport::PutCommand> raised_;
    std::atomic<std::uint64_t> taken_{0};
    std::atomic<std::uint64_t> wrong_{0};
};

}  // namespace mkernel::nics::testing
