// GEMM+ReduceScatter and GEMM+AllReduce (kernels/gemm_reduce/).
#include "backends/accelerators/ascend/host/op_kernels.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"

namespace mkernel::ascend::host {

void check(const gemm_reduce::Geometry& g) {
    check_tiling(g.tiling(), g.dtype);
    check_world(g.world);
}

namespace {

class GemmReduce final : public OpKernels<gemm_reduce::Args> {
  public:
    using OpKernels::OpKernels;

    bool comm(sim::Core& core) const override { return gemm_reduce::comm(core, args_); }
    bool cube(sim::Core& core) const override { return gemm_reduce::compute(core, args_); }
    [[nodiscard]] bool compute_first() const override { return true; }
    std::vector<Tensor> tensors() override {
        return {{&args_.a, false}, {&args_.b, false}, {&args_.out, true}};
    }

    void count_as_communicated(const transport::SignalPad& pad) const override {
        OpKernels::count_as_communicated(pad);
        const gemm_reduce::Geometry& g = args_.geometry;
        for (std::uint32_t tile = 0; g.replicated && tile < g.grid_tiles(); ++tile) {
            const bool own = tile >= g.first(args_.rank) && tile < g.end(args_.rank);
            if (!own) raise(pad, g.summed(tile), 1);
        }
        raise(pad, g.finished(), blocks_.comm);
    }
    [[nodiscard]] std::vector<sim::TraceBaseline> baselines() const override {
        const gemm_reduce::Geometry& g = args_.geometry;
        auto all = OpKernels::baselines(blocks_.comm);
        if (g.replicated) all.push_back(before(g.summed(0), g.grid_tiles(), calls()));
        for (std::uint32_t owner = 0; owner < g.world; ++owner) {
            for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
                const std::uint64_t tiles = g.chunk_end(owner, chunk) - g.chunk_begin(owner, chunk);
                all.push_back(before(g.computed(owner, chunk), 1, calls() * tiles));
            }
        }
        return all;
    }
};

}  // namespace

std::shared_ptr<Kernels> kernels_of(const gemm_reduce::Args& args, Order order) {
    return std::make_shared<GemmReduce>(args, std::move(order));
}

}  // namespace mkernel::ascend::host
