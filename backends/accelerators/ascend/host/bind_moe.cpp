// Bindings of MoE dispatch+GEMM and its combine.
#include <memory>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

moe::Geometry dispatch_geometry(std::uint32_t world, std::uint32_t tokens, std::uint32_t top_k,
                                std::uint32_t experts, std::uint32_t hidden, std::uint32_t features,
                                std::uint32_t rows_per_chunk, bool far, isa::DType dtype,
                                std::uint32_t tile_m, std::uint32_t tile_n, std::uint32_t tile_k,
                                std::uint32_t step_k) {
    const moe::Geometry made{
        .routing = {.world = world, .tokens = tokens, .top_k = top_k, .experts = experts},
        .world = world,
        .hidden = hidden,
        .features = features,
        .rows_per_chunk = rows_per_chunk,
        .far = far,
        .tile_m = tile_m,
        .tile_n = tile_n,
        .tile_k = tile_k,
        .step_k = step_k,
        .dtype = dtype};
    host::check(made);
    return made;
}

moe_combine::Geometry combine_geometry(std::uint32_t world, std::uint32_t tokens,
                                       std::uint32_t top_k, std::uint32_t experts,
                                       std::uint32_t features, std::uint32_t rows_per_chunk,
                                       bool far, isa::DType dtype, isa::DType out_dtype) {
    const moe_combine::Geometry made{
        .routing = {.world = world, .tokens = tokens, .top_k = top_k, .experts = experts},
        .world = world,
        .features = features,
        .rows_per_chunk = rows_per_chunk,
        .far = far,
        .dtype = dtype,
        .out_dtype = out_dtype};
    host::check(made);
    return made;
}

// A dense int32 table.
isa::GlobalView table(std::uint64_t address, std::uint32_t rows, std::uint64_t columns) {
    const auto width = static_cast<std::uint32_t>(columns);
    return {pointer<std::byte>(address), isa::DType::int32, rows, width, width, 1};
}

std::shared_ptr<host::Kernels> dispatch_kernels(
    const moe::Geometry& g, std::uint64_t x, const std::pair<std::uint64_t, std::int64_t>& topk_ids,
    const Matrix& w, std::uint64_t grouped, std::uint64_t out, isa::DType out_dtype,
    std::uint64_t tables, std::uint64_t routing, host::Order order) {
    moe::Args args;
    const std::uint32_t rows = g.routing.most_rows(), experts = g.routing.experts;
    const bool by_rows = std::get<2>(w) == 1;
    args.geometry = g;
    args.x = view({x, g.hidden, 1}, g.dtype, g.routing.tokens, g.hidden);
    args.own_ids =
        view({topk_ids.first, topk_ids.second, 1}, isa::DType::int32, g.routing.places(), 1);
    args.w = view(w, g.dtype, by_rows ? experts * g.hidden : g.hidden,
                  by_rows ? g.features : experts * g.features);
    args.grouped = view({grouped, g.hidden, 1}, g.dtype, rows, g.hidden);
    args.out = view({out, g.features, 1}, out_dtype, rows, g.features);
    args.tables = table(tables, 1, g.table_words());
    args.routing = table(routing, g.world, g.routing.places());
    return host::kernels_of(args, std::move(order));
}

std::shared_ptr<host::Kernels> combine_kernels(const moe_combine::Geometry& g, std::uint64_t y,
                                               std::uint32_t rows, std::uint64_t weights,
                                               std::uint64_t tables, std::uint64_t out,
                                               host::Order order) {
    moe_combine::Args args;
    args.geometry = g;
    args.y = view({y, g.features, 1}, g.dtype, rows, g.features);
    args.weights =
        view({weights, g.routing.top_k, 1}, isa::DType::float32, g.routing.tokens, g.routing.top_k);
    args.tables = table(tables, 1, g.routing.words());
    args.out = view({out, g.features, 1}, g.out_dtype, g.routing.tokens, g.features);
    return host::kernels_of(args, std::move(order));
}

}  // namespace

void bind_moe(py::module_& module) {
    // `experts`: those of one rank. `far`: the world has several nodes.
    bind_geometry<moe::Geometry>(module, "MoeDispatchGeometry")
        .def(py::init(&dispatch_geometry), py::kw_only(), "world"_a, "tokens"_a, "top_k"_a,
             "experts"_a, "hidden"_a, "features"_a, "rows_per_chunk"_a, "far"_a, "dtype"_a,
             "tile_m"_a, "tile_n"_a, "tile_k"_a, "step_k"_a)
        .def_readonly("hidden", &moe::Geometry::hidden)
        .def_readonly("features", &moe::Geometry::features)
        .def_property_readonly("table_words", &moe::Geometry::table_words)
        .def_property_readonly("most_rows",
                               [](const moe::Geometry& g) { return g.routing.most_rows(); })
        .def(
            "ids",
            [](const moe::Geometry& g, std::uint32_t source, std::uint64_t epoch) {
                return word_of(g.ids(source), epoch);
            },
            "source"_a, "epoch"_a);

    bind_geometry<moe_combine::Geometry>(module, "MoeCombineGeometry")
        .def(py::init(&combine_geometry), py::kw_only(), "world"_a, "tokens"_a, "top_k"_a,
             "experts"_a, "features"_a, "rows_per_chunk"_a, "far"_a, "dtype"_a, "out_dtype"_a);

    // `topk_ids`: address, int32 words from one id to the next. `routing`: in a record, the address of all
    // ranks' ids. `order`: the ranks whose tokens to consume, or to which to send. The own rank first.
    module.def("moe_dispatch", &dispatch_kernels, py::kw_only(), "geometry"_a, "x"_a, "topk_ids"_a,
               "w"_a, "grouped"_a, "out"_a, "out_dtype"_a, "tables"_a, "routing"_a, "order"_a);
    module.def("moe_combine", &combine_kernels, py::kw_only(), "geometry"_a, "y"_a, "rows"_a,
               "weights"_a, "tables"_a, "out"_a, "order"_a);
}

}  // namespace mkernel::ascend
