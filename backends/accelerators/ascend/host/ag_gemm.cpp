#include "backends/accelerators/ascend/host/ag_gemm.hpp"

#include <utility>

#include "backends/accelerators/ascend/kernels/ag_gemm/comm.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/compute.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/send_order.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"

namespace mkernel::ascend::host {

void check(const ag_gemm::Geometry& g) {
    check_tiling(g.tiling(), g.dtype);
    check_fits("double-buffered chunks (2 * tile_m * tile_k)",
               std::uint64_t{2} * g.tile_m * g.tile_k * isa::bytes_of(g.dtype), isa::Buffer::UB);
    check_world(g.world);
}

AgGemm::AgGemm(const ag_gemm::Args& args, std::vector<std::uint32_t> order)
    : KernelsOf(args, std::move(order)) {
    check(args_.geometry);
}

void AgGemm::bind(const CallArgs& call, const Blocks& blocks) {
    KernelsOf::bind(call, blocks);
    std::uint32_t near = 0;
    for (std::uint32_t other = 0; other < world(); ++other) near += args_.same_node(other) ? 1 : 0;
    send_order_ = ag_gemm::send_order(args_.geometry, blocks.cube, near - 1);
    args_.send_order = send_order_.data();
}

bool AgGemm::comm(sim::Core& core) const {
    return ag_gemm::comm(core, args_);
}

bool AgGemm::cube(sim::Core& core) const {
    return ag_gemm::compute(core, args_);
}

bool AgGemm::arrived(sim::Core& core) const {
    return await_arrival(core, args_);
}

std::vector<Kernels::Tensor> AgGemm::tensors() {
    return {{&args_.a, false}, {&args_.b, false}, {&args_.out, true}};
}

void AgGemm::count_as_communicated(const runtime::SignalPad& pad) const {
    const ag_gemm::Geometry& g = args_.geometry;
    for (std::uint32_t source = 0; source < g.world; ++source) {
        if (source == args_.rank) continue;
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            pad.add(args_.signal_base + g.arrived(args_.parity(), source, chunk), 1);
        }
        if (args_.same_node(source)) {
            pad.add(args_.signal_base + g.summary(args_.parity(), source), g.chunks());
        }
    }
}

std::vector<sim::TraceBaseline> AgGemm::baselines() const {
    const ag_gemm::Geometry& g = args_.geometry;
    const std::uint32_t base = args_.signal_base, parity = args_.parity();
    const std::uint64_t uses = args_.uses() - 1, calls = args_.epoch - 1;
    return {{base + g.arrived(parity, 0, 0), g.world * g.chunks(), uses},
            {base + g.summary(parity, 0), g.world, uses * g.chunks()},
            {base + g.released(0), g.world, calls},
            {base + g.finished(), 1, calls * blocks_.cube}};
}

}  // namespace mkernel::ascend::host
