#include "backends/accelerators/ascend/host/ring_attention.hpp"

#include <stdexcept>
#include <utility>

#include "backends/accelerators/ascend/kernels/arrival.hpp"
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
}

RingAttention::RingAttention(const ring_attention::Args& args, std::vector<std::uint32_t> order)
    : KernelsOf(args, std::move(order)) {
    check(args_.geometry);
}

void RingAttention::bind(const CallArgs& call, const Blocks& blocks) {
    const std::uint32_t cubes = args_.geometry.cubes;
    if (blocks.cube != cubes || blocks.vector != cubes * ring_attention::kVectorsPerCube) {
        throw std::invalid_argument("ring attention was laid out for " + std::to_string(cubes) +
                                    " cube cores with two vector cores each");
    }
    KernelsOf::bind(call, blocks);
}

bool RingAttention::comm(sim::Core& core) const {
    return ring_attention::comm(core, args_);
}

bool RingAttention::cube(sim::Core& core) const {
    return ring_attention::cube(core, args_);
}

bool RingAttention::vector(sim::Core& core) const {
    return ring_attention::vector(core, args_);
}

bool RingAttention::arrived(sim::Core& core) const {
    return await_arrival(core, args_);
}

std::vector<Kernels::Tensor> RingAttention::tensors() {
    return {{&args_.q, false},
            {&args_.k, false},
            {&args_.v, false},
            {&args_.out, true},
            {&args_.lse, true}};
}

void RingAttention::count_as_communicated(const runtime::SignalPad& pad) const {
    const ring_attention::Geometry& g = args_.geometry;
    for (std::uint32_t source = 0; source < g.world; ++source) {
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            if (source == args_.rank || !g.needs(args_.rank, source, chunk)) continue;
            pad.add(args_.signal_base + g.arrived(args_.parity(), source, chunk), 1);
        }
    }
}

std::vector<sim::TraceBaseline> RingAttention::baselines() const {
    const ring_attention::Geometry& g = args_.geometry;
    const std::uint32_t base = args_.signal_base;
    const std::uint64_t calls = args_.epoch - 1;
    std::vector<sim::TraceBaseline> before{
        {base + g.arrived(args_.parity(), 0, 0), g.world * g.chunks(), args_.uses() - 1},
        {base + g.released(0), g.world, calls},
        {base + g.finished(), 1, calls * g.cubes}};
    for (std::uint32_t cube = 0; cube < g.cubes; ++cube) {
        const std::uint64_t tiles = ring_attention::Steps(args_, cube).size();
        if (tiles == 0) continue;
        before.push_back({base + g.scored(cube), 1, calls * (tiles + ring_attention::kAhead)});
        before.push_back({base + g.weighed(cube * ring_attention::kVectorsPerCube),
                          ring_attention::kVectorsPerCube, calls * tiles});
    }
    return before;
}

}  // namespace mkernel::ascend::host
