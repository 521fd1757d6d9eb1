// MoE dispatch+GEMM and its combine (kernels/moe/, kernels/moe_combine/).
#include <limits>
#include <string>

#include "backends/accelerators/ascend/host/op_kernels.hpp"
#include "backends/accelerators/ascend/kernels/moe/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe/cube.hpp"
#include "backends/accelerators/ascend/kernels/moe/vector.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/vector.hpp"

namespace mkernel::ascend::host {

namespace {

void check(const moe::Routing& r, const char* width_name, std::uint32_t width, isa::DType dtype) {
    check_world(r.world);
    const std::uint64_t rows = std::uint64_t{r.world} * r.tokens * r.top_k;
    if (rows > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument("plan.shape: " + std::to_string(r.world) + " ranks of " +
                                    std::to_string(r.tokens) + " tokens for " +
                                    std::to_string(r.top_k) + " experts each make " +
                                    std::to_string(rows) + " rows; at most 2147483647");
    }
    const std::uint64_t bytes = std::uint64_t{width} * isa::bytes_of(dtype);
    const std::uint32_t most = isa::capacity_of(isa::Buffer::UB) / 2;
    if (bytes > most) {
        throw std::invalid_argument(std::string("plan.shape.") + width_name + " = " +
                                    std::to_string(width) + ": a row takes " +
                                    std::to_string(bytes) + " bytes; a vector core moves rows of " +
                                    "at most " + std::to_string(most));
    }
}

}  // namespace

void check(const moe::Geometry& g) {
    check(g.routing, "hidden", g.hidden, g.dtype);
    check_tiling(g.tiling(), g.dtype);
}

void check(const moe_combine::Geometry& g) {
    check(g.routing, "features", g.features, g.dtype);
}

namespace {

class MoeDispatch final : public OpKernels<moe::Args> {
  public:
    using OpKernels::OpKernels;

    bool comm(sim::Core& core) const override { return moe::comm(core, args_); }
    bool cube(sim::Core& core) const override { return moe::cube(core, args_); }
    bool vector(sim::Core& core) const override { return moe::vector(core, args_); }
    std::vector<Tensor> tensors() override {
        std::vector<Tensor> all{{&args_.x, false},  {&args_.own_ids, false},
                                {&args_.w, false},  {&args_.grouped, true},
                                {&args_.out, true}, {&args_.tables, true}};
        if (args_.routing.base != nullptr) all.push_back({&args_.routing, false});
        return all;
    }
    void foresee(sim::Core& core) const override { core.finish(moe::vector(core, args_)); }

  protected:
    [[nodiscard]] std::uint32_t finishing() const override { return blocks_.vector; }
    void each_arrival(const Amount& amount) const override {
        OpKernels::each_arrival(amount);
        for (std::uint32_t other = 0; other < world(); ++other) {
            if (other != args_.rank) amount(args_.word(args_.geometry.ids(other)), 1);
        }
    }
    void each_own(const Amount& amount) const override {
        const moe::Geometry& g = args_.geometry;
        amount(args_.word(g.counted()), std::uint64_t{g.world} * g.chunks());
        amount(args_.word(g.placed()), g.world);
        for (std::uint32_t source = 0; source < g.world; ++source) {
            for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
                amount(args_.word(g.spread(source, chunk)), 1);
            }
        }
    }
};

class MoeCombine final : public OpKernels<moe_combine::Args> {
  public:
    using OpKernels::OpKernels;

    bool comm(sim::Core& core) const override { return moe_combine::comm(core, args_); }
    bool vector(sim::Core& core) const override { return moe_combine::vector(core, args_); }
    std::vector<Tensor> tensors() override {
        std::vector<Tensor> all{
            {&args_.weights, false}, {&args_.tables, false}, {&args_.out, true}};
        if (args_.y.rows > 0) all.push_back({&args_.y, false});
        return all;
    }

  protected:
    [[nodiscard]] std::uint32_t finishing() const override { return blocks_.vector; }
};

}  // namespace

std::shared_ptr<Kernels> kernels_of(const moe::Args& args, Order order) {
    return std::make_shared<MoeDispatch>(args, std::move(order));
}

std::shared_ptr<Kernels> kernels_of(const moe_combine::Args& args, Order order) {
    return std::make_shared<MoeCombine>(args, std::move(order));
}

}  // namespace mkernel::ascend::host
