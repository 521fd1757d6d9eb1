// Bindings of ring attention.
#include <memory>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"
#include "backends/accelerators/ascend/host/ops.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

using ring_attention::Geometry;

Geometry geometry(std::uint32_t world, std::uint32_t batch, std::uint32_t heads,
                  std::uint32_t kv_heads, std::uint32_t rows, std::uint32_t head_dim, bool causal,
                  const std::string& dtype, std::uint32_t rows_per_chunk, std::uint32_t cubes) {
    const Geometry made{.world = world,
                        .batch = batch,
                        .heads = heads,
                        .kv_heads = kv_heads,
                        .rows = rows,
                        .head_dim = head_dim,
                        .causal = causal,
                        .rows_per_chunk = rows_per_chunk,
                        .cubes = cubes,
                        .dtype = dtype_named(dtype)};
    host::check(made);
    return made;
}

// Tensors by address, contiguous.
std::shared_ptr<host::Kernels> kernels(const Geometry& g, std::uint64_t q, std::uint64_t k,
                                       std::uint64_t v, std::uint64_t out, std::uint64_t lse,
                                       float scale, host::Order order) {
    const auto heads_of = [&g](std::uint64_t address, std::uint32_t heads) {
        return view({address, g.head_dim, 1}, g.dtype, g.batch * heads * g.rows, g.head_dim);
    };
    ring_attention::Args args;
    args.geometry = g;
    args.q = heads_of(q, g.heads);
    args.k = heads_of(k, g.kv_heads);
    args.v = heads_of(v, g.kv_heads);
    args.out = heads_of(out, g.heads);
    args.lse = view({lse, 1, 1}, isa::DType::float32, g.batch * g.heads * g.rows, 1);
    args.scale = scale;
    return host::kernels_of(args, std::move(order));
}

}  // namespace

void bind_ring_attention(py::module_& module) {
    bind_geometry<Geometry>(module, "RingAttentionGeometry")
        .def(py::init(&geometry), py::kw_only(), "world"_a, "batch"_a, "heads"_a, "kv_heads"_a,
             "rows"_a, "head_dim"_a, "causal"_a, "dtype"_a, "rows_per_chunk"_a, "cubes"_a)
        .def("needs", &Geometry::needs, "reader"_a, "source"_a, "chunk"_a);
    module.attr("MAX_HEAD_DIM") = ring_attention::kMaxHeadDim;
    module.def("ring_attention", &kernels, py::kw_only(), "geometry"_a, "q"_a, "k"_a, "v"_a,
               "out"_a, "lse"_a, "scale"_a, "order"_a);
}

}  // namespace mkernel::ascend
