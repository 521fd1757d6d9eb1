#include "backends/accelerators/ascend/host/gemm_reduce.hpp"

#include <utility>

#include "backends/accelerators/ascend/kernels/gemm_ar/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"
#include "backends/accelerators/ascend/kernels/gemm_rs/comm.hpp"

namespace mkernel::ascend::host {

void check(const gemm_reduce::Geometry& g) {
    check_tiling(g.tiling(), g.dtype);
    check_world(g.world);
}

GemmReduce::GemmReduce(const gemm_reduce::Args& args, std::vector<std::uint32_t> order)
    : KernelsOf(args, std::move(order)) {
    check(args_.geometry);
}

bool GemmReduce::comm(sim::Core& core) const {
    return args_.geometry.replicated ? gemm_ar::comm(core, args_) : gemm_rs::comm(core, args_);
}

bool GemmReduce::cube(sim::Core& core) const {
    return gemm_reduce::compute(core, args_);
}

std::vector<Kernels::Tensor> GemmReduce::tensors() {
    return {{&args_.a, false}, {&args_.b, false}, {&args_.out, true}};
}

void GemmReduce::count_as_communicated(const runtime::SignalPad& pad) const {
    const gemm_reduce::Geometry& g = args_.geometry;
    for (std::uint32_t other = 0; other < g.world; ++other) {
        if (other == args_.rank) continue;
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            pad.add(args_.signal_base + g.arrived(args_.parity(), other, chunk), 1);
        }
        for (std::uint32_t tile = g.first(other); g.replicated && tile < g.end(other); ++tile) {
            pad.add(args_.signal_base + g.summed(tile), 1);
        }
    }
    pad.add(args_.signal_base + g.finished(), blocks_.comm);
}

std::vector<sim::TraceBaseline> GemmReduce::baselines() const {
    const gemm_reduce::Geometry& g = args_.geometry;
    const std::uint32_t base = args_.signal_base;
    const std::uint64_t uses = args_.uses() - 1, calls = args_.epoch - 1;
    std::vector<sim::TraceBaseline> before{
        {base + g.arrived(args_.parity(), 0, 0), g.world * g.chunks(), uses},
        {base + g.released(0), g.world, calls},
        {base + g.finished(), 1, calls * blocks_.comm}};
    if (g.replicated) before.push_back({base + g.summed(0), g.grid_tiles(), calls});
    for (std::uint32_t owner = 0; owner < g.world; ++owner) {
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            const std::uint64_t tiles = g.chunk_end(owner, chunk) - g.chunk_begin(owner, chunk);
            before.push_back({base + g.computed(owner, chunk), 1, calls * tiles});
        }
    }
    return before;
}

}  // namespace mkernel::ascend::host
