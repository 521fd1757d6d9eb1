// AllGather+GEMM as a launch runs it (kernels/ag_gemm/).
#pragma once

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"

namespace mkernel::ascend::host {

// Refuses (std::invalid_argument) tiles that the on-chip buffers cannot hold.
void check(const ag_gemm::Geometry& geometry);

class AgGemm final : public KernelsOf<ag_gemm::Args> {
  public:
    // `args`: geometry and tensors. `order`: whose rows to consume, the own rank's first.
    AgGemm(const ag_gemm::Args& args, std::vector<std::uint32_t> order);

    void bind(const CallArgs& call, const Blocks& blocks) override;
    bool comm(sim::Core& core) const override;
    bool cube(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return false; }
    bool arrived(sim::Core& core) const override;
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;

  private:
    std::vector<std::uint32_t> send_order_;
};

}  // namespace mkernel::ascend::host
