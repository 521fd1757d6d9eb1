// Bindings of ring attention.
#include <memory>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

using ring_attention::Geometry;

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
    auto geometry = bind_geometry<Geometry>(module, "RingAttentionGeometry");
    geometry.def("needs", &Geometry::needs, "reader"_a, "source"_a, "chunk"_a);
    bind_init(geometry, Field{"world", &Geometry::world}, Field{"batch", &Geometry::batch},
              Field{"heads", &Geometry::heads}, Field{"kv_heads", &Geometry::kv_heads},
              Field{"rows", &Geometry::rows}, Field{"head_dim", &Geometry::head_dim},
              Field{"causal", &Geometry::causal}, Field{"ordered", &Geometry::ordered},
              Field{"dtype", &Geometry::dtype}, Field{"rows_per_chunk", &Geometry::rows_per_chunk},
              Field{"cubes", &Geometry::cubes});
    module.attr("MAX_HEAD_DIM") = ring_attention::kMaxHeadDim;
    module.attr("ORDERED_KEYS") = ring_attention::kOrderedKeys;
    module.def("ring_attention", &kernels, py::kw_only(), "geometry"_a, "q"_a, "k"_a, "v"_a,
               "out"_a, "lse"_a, "scale"_a, "order"_a);
}

}  // namespace mkernel::ascend
