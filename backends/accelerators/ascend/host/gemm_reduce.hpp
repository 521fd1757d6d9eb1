// GEMM+ReduceScatter and GEMM+AllReduce as a launch runs them (kernels/gemm_reduce/, gemm_rs/,
// gemm_ar/).
#pragma once

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"

namespace mkernel::ascend::host {

// Refuses (std::invalid_argument) tiles that the on-chip buffers cannot hold.
void check(const gemm_reduce::Geometry& geometry);

class GemmReduce final : public Kernels {
  public:
    // `args`: geometry and tensors. `owners`: for whom to compute, the own rank first.
    GemmReduce(const gemm_reduce::Args& args, std::vector<std::uint32_t> owners);

    void bind(const CallArgs& call, std::uint32_t compute_blocks,
              std::uint32_t comm_blocks) override;
    bool comm(sim::Core& core) const override;
    bool compute(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return true; }
    [[nodiscard]] std::uint32_t world() const override { return args_.geometry.world; }
    [[nodiscard]] std::uint32_t signals() const override { return args_.geometry.signals(); }
    [[nodiscard]] std::uint64_t workspace_bytes() const override {
        return args_.geometry.workspace_bytes();
    }
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;

  private:
    gemm_reduce::Args args_;
    std::vector<std::uint32_t> owners_;
    std::uint32_t comm_blocks_ = 1;
};

}  // namespace mkernel::ascend::host
