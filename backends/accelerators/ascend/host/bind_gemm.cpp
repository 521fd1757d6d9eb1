// Bindings of AllGather+GEMM, GEMM+ReduceScatter and GEMM+AllReduce.
#include <memory>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

std::shared_ptr<host::Kernels> ag_kernels(const ag_gemm::Geometry& g, const Matrix& a,
                                          const Matrix& b, const Matrix& out, isa::DType out_dtype,
                                          host::Order order) {
    ag_gemm::Args args;
    args.geometry = g;
    args.a = view(a, g.dtype, g.m_local, g.k);
    args.b = view(b, g.dtype, g.k, g.n);
    args.out = view(out, out_dtype, g.m_local * g.world, g.n);
    return host::kernels_of(args, std::move(order));
}

std::shared_ptr<host::Kernels> reduce_kernels(const gemm_reduce::Geometry& g, const Matrix& a,
                                              const Matrix& b, const Matrix& out,
                                              host::Order order) {
    gemm_reduce::Args args;
    args.geometry = g;
    args.a = view(a, g.dtype, g.m, g.k);
    args.b = view(b, g.dtype, g.k, g.n);
    args.out = view(out, g.out_dtype, g.grid_rows(), g.n);
    return host::kernels_of(args, std::move(order));
}

}  // namespace

void bind_gemm(py::module_& module) {
    using Gather = ag_gemm::Geometry;
    auto gather = bind_geometry<Gather>(module, "AgGemmGeometry");
    gather.def("slot_offset", &Gather::slot_offset, "reader"_a, "source"_a);
    bind_init(gather, Field{"world", &Gather::world}, Field{"m_local", &Gather::m_local},
              Field{"n", &Gather::n}, Field{"k", &Gather::k}, Field{"dtype", &Gather::dtype},
              Field{"tile_m", &Gather::tile_m}, Field{"tile_n", &Gather::tile_n},
              Field{"tile_k", &Gather::tile_k}, Field{"step_k", &Gather::step_k},
              Field{"tiles_per_chunk", &Gather::tiles_per_chunk});

    using Reduce = gemm_reduce::Geometry;
    auto reduce = bind_geometry<Reduce>(module, "GemmReduceGeometry");
    bind_init(reduce, Field{"world", &Reduce::world}, Field{"m", &Reduce::m},
              Field{"n", &Reduce::n}, Field{"k", &Reduce::k}, Field{"dtype", &Reduce::dtype},
              Field{"out_dtype", &Reduce::out_dtype},
              Field{"partial_dtype", &Reduce::partial_dtype}, Field{"segments", &Reduce::segments},
              Field{"replicated", &Reduce::replicated}, Field{"band", &Reduce::band},
              Field{"tile_m", &Reduce::tile_m}, Field{"tile_n", &Reduce::tile_n},
              Field{"tile_k", &Reduce::tile_k}, Field{"step_k", &Reduce::step_k},
              Field{"tiles_per_chunk", &Reduce::tiles_per_chunk});

    // `order`: the ranks whose rows to consume, or for which to compute. The own rank first.
    module.def("ag_gemm", &ag_kernels, py::kw_only(), "geometry"_a, "a"_a, "b"_a, "out"_a,
               "out_dtype"_a, "order"_a);
    module.def("gemm_reduce", &reduce_kernels, py::kw_only(), "geometry"_a, "a"_a, "b"_a, "out"_a,
               "order"_a);
}

}  // namespace mkernel::ascend
