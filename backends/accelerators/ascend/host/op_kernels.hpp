// The part of Kernels that is alike for every op.
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
    [[nodiscard]] std::uint64_t words() const override { return args_.geometry.words(); }
    [[nodiscard]] std::uint64_t inbox_bytes() const override {
        return args_.geometry.inbox_bytes();
    }
    [[nodiscard]] std::uint64_t outbox_bytes() const override {
        return args_.geometry.outbox_bytes();
    }
    [[nodiscard]] std::uint64_t scratch_bytes() const override {
        return args_.geometry.scratch_bytes();
    }

    void each_amount(const Amount& amount) const override {
        if (world() > 1) {
            amount(args_.word(args_.geometry.finished()), finishing());
            for (std::uint32_t other = 0; other < world(); ++other) {
                if (other != args_.rank) amount(other, 1);  // its release
            }
            if (!args_.compute_only) each_arrival(amount);
        }
        each_own(amount);
    }

  protected:
    // Returns the number of blocks that release the call together.
    [[nodiscard]] virtual std::uint32_t finishing() const = 0;
    // Calls `amount` with what other ranks add to remote words.
    virtual void each_arrival(const Amount& amount) const {
        for (std::uint32_t source = 0; source < world(); ++source) {
            for (std::uint32_t chunk = 0; chunk < args_.geometry.chunks(); ++chunk) {
                if (source == args_.rank || !is_sent_here(args_, source, chunk)) continue;
                amount(args_.word(args_.geometry.arrived(source, chunk)), 1);
            }
        }
    }
    // Calls `amount` with what cores of this rank add to local words beside `finished`.
    virtual void each_own(const Amount&) const {}

    Args args_;
    Blocks blocks_;

  private:
    Order order_;
};

}  // namespace mkernel::ascend::host
