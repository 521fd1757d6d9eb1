// Memory of simulated ranks: pages, signal pads, and addresses that nothing lies at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/kernels/call.hpp"
#include "backends/accelerators/ascend/sim/core.hpp"
#include "tests/native/ascend/check.hpp"

namespace mkernel::ascend::test {

// Zeroed, page-aligned memory.
struct Pages {
    explicit Pages(std::size_t bytes)
        : memory(static_cast<std::byte*>(
                     std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096)),
                 &std::free) {
        std::memset(memory.get(), 0, bytes);
    }
    std::unique_ptr<std::byte, decltype(&std::free)> memory;
};

// A formatted signal pad.
struct Pad {
    explicit Pad(std::uint32_t signals)
        : pages(transport::SignalPad::bytes(signals)),
          signals(transport::SignalPad::format(pages.memory.get(), signals)) {}
    [[nodiscard]] std::byte* memory() const { return pages.memory.get(); }
    Pages pages;
    transport::SignalPad signals;
};

// One rank whose kernels run dry, alone and strictly: order is checked, nothing is computed.
class DryRank {
  public:
    // Ranks below `near` are on the rank's node.
    DryRank(std::uint32_t rank, std::uint32_t world, std::uint32_t near) : rank_(rank) {
        for (std::uint32_t i = 0; i < world; ++i) {
            std::byte* memory = i < near ? at(8 + i) : nullptr;
            peers_.push_back({memory, memory});
            order_.push_back((rank + i) % world);
        }
    }
    DryRank(const DryRank&) = delete;

    static std::byte* at(std::size_t number) {
        return reinterpret_cast<std::byte*>((std::uintptr_t{1} << 44) + (number << 24));
    }
    static isa::GlobalView view(std::size_t number, std::uint32_t rows, std::uint32_t cols,
                                isa::DType dtype) {
        return {at(number), dtype, rows, cols, cols, 1};
    }

    // What strict simulation says of block `index` of `count` of a kernel, `kernel(core)`, without the
    // syncs of those numbers.
    template <class Kernel>
    std::string says(sim::Role role, std::uint32_t index, std::uint32_t count,
                     std::vector<std::uint32_t> without, const Kernel& kernel) {
        sim::Environment environment = dry();
        environment.strict.emplace().skip = {role, index, std::move(without), {}};
        trace_.clear();
        sim::Core core(environment, role, index, count, memory_, &trace_);
        return thrown<sim::IsaError>([&] { core.finish(kernel(core)); });
    }
    // What the latest run issued, in order.
    [[nodiscard]] const std::vector<sim::Record>& trace() const { return trace_; }

  protected:
    void bind(CallArgs& args) const {
        args.rank = rank_;
        args.inbox = args.pad = at(8);
        args.outbox = at(1000);
        args.scratch = at(2000);
        args.peers = peers_.data();
        args.order = order_.data();
    }
    [[nodiscard]] sim::Environment dry() const {
        sim::Environment environment;
        environment.dry = true;
        environment.rank = rank_;
        environment.memory = real_;
        environment.memory.push_back({at(0), std::size_t{1} << 40, true, false});
        return environment;
    }

    std::vector<sim::GmRange> real_;  // what scalar instructions touch
    sim::OnChip memory_;

  private:
    std::uint32_t rank_;
    std::vector<Peer> peers_;
    std::vector<std::uint32_t> order_;
    std::vector<sim::Record> trace_;
};

}  // namespace mkernel::ascend::test
