// Bindings of AllGather+GEMM, GEMM+ReduceScatter and GEMM+AllReduce.
#include <memory>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"
#include "backends/accelerators/ascend/host/ops.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

ag_gemm::Geometry ag_geometry(std::uint32_t world, std::uint32_t m_local, std::uint32_t n,
                              std::uint32_t k, const std::string& dtype, std::uint32_t tile_m,
                              std::uint32_t tile_n, std::uint32_t tile_k, std::uint32_t step_k,
                              std::uint32_t tiles_per_chunk) {
    const ag_gemm::Geometry made{.world = world,
                                 .m_local = m_local,
                                 .n = n,
                                 .k = k,
                                 .tile_m = tile_m,
                                 .tile_n = tile_n,
                                 .tile_k = tile_k,
                                 .step_k = step_k,
                                 .tiles_per_chunk = tiles_per_chunk,
                                 .dtype = dtype_named(dtype)};
    host::check(made);
    return made;
}

gemm_reduce::Geometry reduce_geometry(std::uint32_t world, std::uint32_t m, std::uint32_t n,
                                      std::uint32_t k, const std::string& dtype,
                                      const std::string& out_dtype, bool replicated,
                                      std::uint32_t tile_m, std::uint32_t tile_n,
                                      std::uint32_t tile_k, std::uint32_t step_k,
                                      std::uint32_t tiles_per_chunk) {
    const gemm_reduce::Geometry made{.world = world,
                                     .m = m,
                                     .n = n,
                                     .k = k,
                                     .tile_m = tile_m,
                                     .tile_n = tile_n,
                                     .tile_k = tile_k,
                                     .step_k = step_k,
                                     .tiles_per_chunk = tiles_per_chunk,
                                     .replicated = replicated,
                                     .dtype = dtype_named(dtype),
                                     .out_dtype = dtype_named(out_dtype)};
    host::check(made);
    return made;
}

std::shared_ptr<host::Kernels> ag_kernels(const ag_gemm::Geometry& g, const Matrix& a,
                                          const Matrix& b, const Matrix& out,
                                          const std::string& out_dtype, host::Order order) {
    ag_gemm::Args args;
    args.geometry = g;
    args.a = view(a, g.dtype, g.m_local, g.k);
    args.b = view(b, g.dtype, g.k, g.n);
    args.out = view(out, dtype_named(out_dtype), g.m_local * g.world, g.n);
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
    bind_geometry<ag_gemm::Geometry>(module, "AgGemmGeometry")
        .def(py::init(&ag_geometry), py::kw_only(), "world"_a, "m_local"_a, "n"_a, "k"_a, "dtype"_a,
             "tile_m"_a, "tile_n"_a, "tile_k"_a, "step_k"_a, "tiles_per_chunk"_a)
        .def("summary", &ag_gemm::Geometry::summary, "parity"_a, "source"_a)
        .def("slot_offset", &ag_gemm::Geometry::slot_offset, "parity"_a, "source"_a);

    bind_geometry<gemm_reduce::Geometry>(module, "GemmReduceGeometry")
        .def(py::init(&reduce_geometry), py::kw_only(), "world"_a, "m"_a, "n"_a, "k"_a, "dtype"_a,
             "out_dtype"_a, "replicated"_a, "tile_m"_a, "tile_n"_a, "tile_k"_a, "step_k"_a,
             "tiles_per_chunk"_a)
        .def("summed", &gemm_reduce::Geometry::summed, "tile"_a);

    // `order`: whose rows to consume; for whom to compute. The own rank first.
    module.def("ag_gemm", &ag_kernels, py::kw_only(), "geometry"_a, "a"_a, "b"_a, "out"_a,
               "out_dtype"_a, "order"_a);
    module.def("gemm_reduce", &reduce_kernels, py::kw_only(), "geometry"_a, "a"_a, "b"_a, "out"_a,
               "order"_a);
}

}  // namespace mkernel::ascend
