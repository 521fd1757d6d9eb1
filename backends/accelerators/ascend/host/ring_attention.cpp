// Ring attention (kernels/ring_attention/).
#include "backends/accelerators/ascend/host/op_kernels.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/comm.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/cube.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/steps.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/vector.hpp"

namespace mkernel::ascend::host {

void check(const ring_attention::Geometry& g) {
    check_world(g.world);
    if (g.head_dim > ring_attention::kMaxHeadDim) {
        throw std::invalid_argument("head_dim = " + std::to_string(g.head_dim) +
                                    " is more than the results of 16 queries take; at most " +
                                    std::to_string(ring_attention::kMaxHeadDim));
    }
    if (g.cubes == 0 || g.rows_per_chunk == 0 || g.rows == 0 || g.rows % g.pieces() != 0 ||
        g.kv_heads == 0 || g.heads % g.kv_heads != 0) {
        throw std::invalid_argument(
            "ring attention needs a cube core, a chunk size, as many positions in each piece and "
            "as many query heads for each head of keys");
    }
    if (g.ordered && g.pieces() * g.world > 1 &&
        g.piece_rows() % ring_attention::kOrderedKeys != 0) {
        throw std::invalid_argument("pieces of " + std::to_string(g.piece_rows()) +
                                    " positions cut blocks of " +
                                    std::to_string(ring_attention::kOrderedKeys) + " keys");
    }
}

namespace {

class RingAttention final : public OpKernels<ring_attention::Args> {
  public:
    using OpKernels::OpKernels;

    void bind(const CallArgs& call, const Blocks& blocks) override {
        const std::uint32_t cubes = args_.geometry.cubes;
        if (blocks.cube != cubes || blocks.vector != cubes * ring_attention::kVectorsPerCube) {
            throw std::invalid_argument("ring attention was laid out for " + std::to_string(cubes) +
                                        " cube cores with two vector cores each");
        }
        OpKernels::bind(call, blocks);
    }
    bool comm(sim::Core& core) const override { return ring_attention::comm(core, args_); }
    bool cube(sim::Core& core) const override { return ring_attention::cube(core, args_); }
    bool vector(sim::Core& core) const override { return ring_attention::vector(core, args_); }
    std::vector<Tensor> tensors() override {
        return {{&args_.q, false},
                {&args_.k, false},
                {&args_.v, false},
                {&args_.out, true},
                {&args_.lse, true}};
    }

  protected:
    [[nodiscard]] std::uint32_t finishing() const override { return args_.geometry.cubes; }
    void each_own(const Amount& amount) const override {
        using ring_attention::kVectorsPerCube;
        const ring_attention::Geometry& g = args_.geometry;
        for (std::uint32_t cube = 0; cube < g.cubes; ++cube) {
            const std::uint64_t tiles = ring_attention::Steps(args_, cube).size();
            if (tiles == 0) continue;
            amount(args_.word(g.scored(cube)), tiles + ring_attention::kAhead);
            for (std::uint32_t half = 0; half < kVectorsPerCube; ++half) {
                amount(args_.word(g.weighed(cube * kVectorsPerCube + half)), tiles);
            }
        }
    }
};

}  // namespace

std::shared_ptr<Kernels> kernels_of(const ring_attention::Args& args, Order order) {
    return std::make_shared<RingAttention>(args, std::move(order));
}

}  // namespace mkernel::ascend::host
