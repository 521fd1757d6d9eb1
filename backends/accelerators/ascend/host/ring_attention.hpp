// Ring attention as a launch runs it (kernels/ring_attention/).
#pragma once

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/args.hpp"

namespace mkernel::ascend::host {

// Refuses (std::invalid_argument) what the kernels cannot run.
void check(const ring_attention::Geometry& geometry);

class RingAttention final : public KernelsOf<ring_attention::Args> {
  public:
    // `args`: geometry, tensors and scale. `order`: whose keys to see, the own rank's first.
    RingAttention(const ring_attention::Args& args, std::vector<std::uint32_t> order);

    // Refuses (std::invalid_argument) blocks other than the geometry's cube cores, each with its
    // vector cores.
    void bind(const CallArgs& call, const Blocks& blocks) override;
    bool comm(sim::Core& core) const override;
    bool cube(sim::Core& core) const override;
    bool vector(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return false; }
    bool arrived(sim::Core& core) const override;
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;
};

}  // namespace mkernel::ascend::host
