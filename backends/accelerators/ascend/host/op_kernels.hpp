// What every op's kernels answer alike.
#pragma once

#include <stdexcept>
#include <utility>

#include "backends/accelerators/ascend/host/ops.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"

namespace mkernel::ascend::host {

// `Args`: CallArgs with a `geometry`, whose ranks send each other chunks (kernels/arrival.hpp) and release
// them (kernels/release.hpp).
template <class Args>
class OpKernels : public Kernels {
  public:
    OpKernels(const Args& args, Order order) : args_(args), order_(std::move(order)) {
        check(args_.geometry);
        if (order_.size() != world()) {
            throw std::invalid_argument("order must have one entry a rank");
        }
    }

    void bind(const CallArgs& call, const Blocks& blocks) override {
        static_cast<CallArgs&>(args_) = call;
        args_.order = order_.data();
        blocks_ = blocks;
    }
    bool arrived(sim::Core& core) const override { return await_arrival(core, args_); }
    [[nodiscard]] std::uint32_t world() const override { return args_.geometry.world; }
    [[nodiscard]] std::uint32_t signals() const override { return args_.geometry.signals(); }
    [[nodiscard]] std::uint64_t workspace_bytes() const override {
        return args_.geometry.workspace_bytes();
    }

    void count_as_communicated(const transport::SignalPad& pad) const override {
        for (std::uint32_t source = 0; source < world(); ++source) {
            for (std::uint32_t chunk = 0; chunk < args_.geometry.chunks(); ++chunk) {
                if (source == args_.rank || !is_sent_here(args_, source, chunk)) continue;
                raise(pad, args_.geometry.arrived(args_.parity(), source, chunk), 1);
            }
        }
    }

  protected:
    // `finishing`: the blocks that count `finished` up in each call.
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines(std::uint32_t finishing) const {
        const auto& g = args_.geometry;
        return {before(g.arrived(args_.parity(), 0, 0), world() * g.chunks(), uses()),
                before(g.released(0), world(), calls()),
                before(g.finished(), 1, calls() * finishing)};
    }
    // `count` signals of the plan from `first` on, each at `value`.
    [[nodiscard]] sim::TraceBaseline before(std::uint32_t first, std::uint32_t count,
                                            std::uint64_t value) const {
        return {args_.signal_base + first, count, value};
    }
    // Earlier calls: all, and those of the same parity.
    [[nodiscard]] std::uint64_t calls() const { return args_.epoch - 1; }
    [[nodiscard]] std::uint64_t uses() const { return args_.uses() - 1; }

    void raise(const transport::SignalPad& pad, std::uint32_t signal, std::uint64_t value) const {
        pad.add(args_.signal_base + signal, value);
    }

    Args args_;
    Blocks blocks_;

  private:
    Order order_;
};

}  // namespace mkernel::ascend::host
