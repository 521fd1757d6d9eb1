// MoE dispatch+GEMM and its combine as launches run them (kernels/moe/, kernels/moe_combine/).
#pragma once

#include <vector>

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/moe/args.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/args.hpp"

namespace mkernel::ascend::host {

// Refuse (std::invalid_argument) what the on-chip buffers or 32-bit row numbers cannot hold.
void check(const moe::Geometry& geometry);
void check(const moe_combine::Geometry& geometry);

class MoeDispatch final : public KernelsOf<moe::Args> {
  public:
    // `args`: geometry and tensors. `order`: whose tokens to consume, the own rank's first.
    MoeDispatch(const moe::Args& args, std::vector<std::uint32_t> order);

    bool comm(sim::Core& core) const override;
    bool cube(sim::Core& core) const override;
    bool vector(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return false; }
    bool arrived(sim::Core& core) const override;
    std::vector<Tensor> tensors() override;
    void foresee(sim::Core& core) const override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;
};

class MoeCombine final : public KernelsOf<moe_combine::Args> {
  public:
    // `args`: geometry and tensors. `order`: to whom to send, the own rank first.
    MoeCombine(const moe_combine::Args& args, std::vector<std::uint32_t> order);

    bool comm(sim::Core& core) const override;
    bool vector(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return false; }
    bool arrived(sim::Core& core) const override;
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;
};

}  // namespace mkernel::ascend::host
