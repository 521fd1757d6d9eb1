// GEMM+ReduceScatter and GEMM+AllReduce as a launch runs them (kernels/gemm_reduce/, gemm_rs/,
// gemm_ar/).
#pragma once

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"

namespace mkernel::ascend::host {

// Refuses (std::invalid_argument) tiles that the on-chip buffers cannot hold.
void check(const gemm_reduce::Geometry& geometry);

class GemmReduce final : public KernelsOf<gemm_reduce::Args> {
  public:
    // `args`: geometry and tensors. `order`: for whom to compute, the own rank first.
    GemmReduce(const gemm_reduce::Args& args, std::vector<std::uint32_t> order);

    bool comm(sim::Core& core) const override;
    bool cube(sim::Core& core) const override;
    [[nodiscard]] bool compute_first() const override { return true; }
    std::vector<Tensor> tensors() override;
    void count_as_communicated(const runtime::SignalPad& pad) const override;
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override;
};

}  // namespace mkernel::ascend::host
