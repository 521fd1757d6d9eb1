// AllGather+GEMM as a launch runs it (kernels/ag_gemm/).
#pragma once

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"

namespace mkernel::ascend::host {

// Refuses (std::invalid_argument) tiles that the on-chip buffers cannot hold.
void check(const ag_gemm::Geometry& geometry);

class AgGemm final : public Kernels {
  public:
    // `args`: geometry and tensors. `source_order`: whose rows to consume, the own rank's first.
    AgGemm(const ag_gemm::Args& args, std::vector<std::uint32_t> source_order);

    void bind(const CallArgs& call, std::uint32_t compute_blocks,
              std::uint32_t comm_blocks) override;
    bool comm(sim::Core& core) const override;
    bool compute(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return false; }
    bool arrived(sim::Core& core) const override;
    [[nodiscard]] std::uint32_t world() const override { return args_.geometry.world; }
    [[nodiscard]] std::uint32_t signals() const override { return args_.geometry.signals(); }
    [[nodiscard]] std::uint64_t workspace_bytes() const override {
        return args_.geometry.workspace_bytes();
    }
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;

  private:
    ag_gemm::Args args_;
    std::vector<std::uint32_t> source_order_, send_order_;
    std::uint32_t compute_blocks_ = 1;
};

}  // namespace mkernel::ascend::host
