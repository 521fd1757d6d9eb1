// AllGather+GEMM (kernels/ag_gemm/).
#include "backends/accelerators/ascend/host/op_kernels.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/comm.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/compute.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/send_order.hpp"

namespace mkernel::ascend::host {

void check(const ag_gemm::Geometry& g) {
    check_tiling(g.tiling(), g.dtype);
    check_fits("double-buffered chunks (2 * tile_m * tile_k)",
               std::uint64_t{2} * g.tile_m * g.tile_k * isa::bytes_of(g.dtype), isa::Buffer::UB);
    check_world(g.world);
}

namespace {

class AgGemm final : public OpKernels<ag_gemm::Args> {
  public:
    using OpKernels::OpKernels;

    void bind(const CallArgs& call, const Blocks& blocks) override {
        OpKernels::bind(call, blocks);
        std::uint32_t near = 0;
        for (std::uint32_t rank = 0; rank < world(); ++rank) near += args_.same_node(rank) ? 1 : 0;
        send_order_ = ag_gemm::send_order(args_.geometry, blocks.cube, near - 1);
        args_.send_order = send_order_.data();
    }
    bool comm(sim::Core& core) const override { return ag_gemm::comm(core, args_); }
    bool cube(sim::Core& core) const override { return ag_gemm::compute(core, args_); }
    std::vector<Tensor> tensors() override {
        return {{&args_.a, false}, {&args_.b, false}, {&args_.out, true}};
    }

  protected:
    [[nodiscard]] std::uint32_t finishing() const override { return blocks_.cube; }

  private:
    std::vector<std::uint32_t> send_order_;
};

}  // namespace

std::shared_ptr<Kernels> kernels_of(const ag_gemm::Args& args, Order order) {
    return std::make_shared<AgGemm>(args, std::move(order));
}

}  // namespace mkernel::ascend::host
