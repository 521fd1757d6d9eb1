// GEMM+ReduceScatter and GEMM+AllReduce (kernels/gemm_reduce/).
#include <bit>

#include "backends/accelerators/ascend/host/op_kernels.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"

namespace mkernel::ascend::host {

void check(const gemm_reduce::Geometry& g) {
    check_tiling(g.tiling(), g.dtype);
    check_world(g.world);
    if (g.segments == 0 && g.partial_dtype != g.out_dtype &&
        g.partial_dtype != isa::DType::float32) {
        throw std::invalid_argument(
            std::string("plan.schedule.partial_dtype = ") + isa::name_of(g.partial_dtype) +
            " is not legal; expected float32 or that of the output, " + isa::name_of(g.out_dtype));
    }
    if (g.band == 0 || g.band > divide_up(g.grid_rows(), g.tile_m)) {
        throw std::invalid_argument(
            "plan.schedule.band = " + std::to_string(g.band) + " is not legal; expected 1 to " +
            std::to_string(divide_up(g.grid_rows(), g.tile_m)) + ", the groups of tile_m rows");
    }
    if (g.segments == 0) return;
    if (!std::has_single_bit(g.segments) || g.segments > gemm_reduce::kMostSegments ||
        g.segments % g.world != 0 || g.k % g.leaves() != 0) {
        throw std::invalid_argument("plan.invariant.segments = " + std::to_string(g.segments) +
                                    " is not legal; expected a power of two, at most " +
                                    std::to_string(gemm_reduce::kMostSegments) +
                                    ", that the world's " + std::to_string(g.world) +
                                    " ranks divide, and K of each rank, " + std::to_string(g.k) +
                                    ", in whole segments");
    }
}

namespace {

class GemmReduce final : public OpKernels<gemm_reduce::Args> {
  public:
    using OpKernels::OpKernels;

    bool comm(sim::Core& core) const override { return gemm_reduce::comm(core, args_); }
    bool cube(sim::Core& core) const override { return gemm_reduce::compute(core, args_); }
    [[nodiscard]] bool compute_first() const override { return true; }
    [[nodiscard]] bool communicates() const override { return !args_.geometry.complete(); }
    std::vector<Tensor> tensors() override {
        return {{&args_.a, false}, {&args_.b, false}, {&args_.out, true}};
    }

  protected:
    [[nodiscard]] std::uint32_t finishing() const override {
        return args_.compute_only ? blocks_.cube : blocks_.comm;
    }
    void each_arrival(const Amount& amount) const override {
        OpKernels::each_arrival(amount);
        const gemm_reduce::Geometry& g = args_.geometry;
        for (std::uint32_t tile = 0; g.replicated && tile < g.grid_tiles(); ++tile) {
            const bool own = tile >= g.first(args_.rank) && tile < g.end(args_.rank);
            if (!own) amount(args_.word(g.summed(tile)), 1);
        }
    }
    void each_own(const Amount& amount) const override {
        const gemm_reduce::Geometry& g = args_.geometry;
        for (std::uint32_t owner = 0; !g.complete() && owner < g.world; ++owner) {
            for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
                amount(args_.word(g.computed(owner, chunk)), g.chunk_tiles(owner, chunk));
            }
        }
    }
};

}  // namespace

std::shared_ptr<Kernels> kernels_of(const gemm_reduce::Args& args, Order order) {
    return std::make_shared<GemmReduce>(args, std::move(order));
}

}  // namespace mkernel::ascend::host
