#include "backends/accelerators/ascend/host/moe.hpp"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "backends/accelerators/ascend/kernels/arrival.hpp"
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

MoeDispatch::MoeDispatch(const moe::Args& args, std::vector<std::uint32_t> order)
    : KernelsOf(args, std::move(order)) {
    check(args_.geometry);
}

bool MoeDispatch::comm(sim::Core& core) const {
    return moe::comm(core, args_);
}

bool MoeDispatch::cube(sim::Core& core) const {
    return moe::cube(core, args_);
}

bool MoeDispatch::vector(sim::Core& core) const {
    return moe::vector(core, args_);
}

bool MoeDispatch::arrived(sim::Core& core) const {
    return moe::await_arrival(core, args_);
}

void MoeDispatch::foresee(sim::Core& core) const {
    core.finish(moe::vector(core, args_));
}

std::vector<Kernels::Tensor> MoeDispatch::tensors() {
    std::vector<Tensor> all{{&args_.x, false},      {&args_.own_ids, false}, {&args_.w, false},
                            {&args_.grouped, true}, {&args_.out, true},      {&args_.tables, true}};
    if (args_.routing.base != nullptr) all.push_back({&args_.routing, false});
    return all;
}

void MoeDispatch::count_as_communicated(const runtime::SignalPad& pad) const {
    const moe::Geometry& g = args_.geometry;
    for (std::uint32_t other = 0; other < g.world; ++other) {
        if (other == args_.rank) continue;
        pad.add(args_.signal_base + g.ids(args_.parity(), other), 1);
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            pad.add(args_.signal_base + g.arrived(args_.parity(), other, chunk), 1);
        }
    }
}

std::vector<sim::TraceBaseline> MoeDispatch::baselines() const {
    const moe::Geometry& g = args_.geometry;
    const std::uint32_t base = args_.signal_base, parity = args_.parity();
    const std::uint64_t uses = args_.uses() - 1, calls = args_.epoch - 1;
    return {{base + g.ids(parity, 0), g.world, uses},
            {base + g.arrived(parity, 0, 0), g.world * g.chunks(), uses},
            {base + g.spread(0, 0), g.world * g.chunks(), calls},
            {base + g.counted(), 1, calls * g.world * g.chunks()},
            {base + g.placed(), 1, calls * g.world},
            {base + g.released(0), g.world, calls},
            {base + g.finished(), 1, calls * blocks_.vector}};
}

MoeCombine::MoeCombine(const moe_combine::Args& args, std::vector<std::uint32_t> order)
    : KernelsOf(args, std::move(order)) {
    check(args_.geometry);
}

bool MoeCombine::comm(sim::Core& core) const {
    return moe_combine::comm(core, args_);
}

bool MoeCombine::vector(sim::Core& core) const {
    return moe_combine::vector(core, args_);
}

bool MoeCombine::arrived(sim::Core& core) const {
    return await_arrival(core, args_);
}

std::vector<Kernels::Tensor> MoeCombine::tensors() {
    std::vector<Tensor> all{{&args_.weights, false}, {&args_.tables, false}, {&args_.out, true}};
    if (args_.y.rows > 0) all.push_back({&args_.y, false});
    return all;
}

void MoeCombine::count_as_communicated(const runtime::SignalPad& pad) const {
    const moe_combine::Geometry& g = args_.geometry;
    for (std::uint32_t other = 0; other < g.world; ++other) {
        for (std::uint32_t chunk = 0; other != args_.rank && chunk < g.chunks(); ++chunk) {
            pad.add(args_.signal_base + g.arrived(args_.parity(), other, chunk), 1);
        }
    }
}

std::vector<sim::TraceBaseline> MoeCombine::baselines() const {
    const moe_combine::Geometry& g = args_.geometry;
    const std::uint32_t base = args_.signal_base;
    const std::uint64_t calls = args_.epoch - 1;
    return {{base + g.arrived(args_.parity(), 0, 0), g.world * g.chunks(), args_.uses() - 1},
            {base + g.released(0), g.world, calls},
            {base + g.finished(), 1, calls * blocks_.vector}};
}

}  // namespace mkernel::ascend::host
