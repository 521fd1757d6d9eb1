// The grouped product of MoE, for Python.
#include <pybind11/pybind11.h>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/moe/grouped.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {

void bind_grouped(py::module_& module) {
    using moe::GroupedProduct;
    using moe::Sizes;
    using Word = std::int32_t;
    using Address = std::uint64_t;

    py::class_<GroupedProduct>(module, "GroupedProduct")
        .def(py::init([](const Sizes& sizes, Address routing, Address a, Address permuted,
                         Address b, Address out, Address a_scales, Address b_scales,
                         Address out_scales, Address row_bytes, Word rows, Word n, Word k,
                         Word height, Word pieces, bool half, bool n_major, bool tokens, bool gated,
                         bool wide, bool home, bool waits, bool ends, bool deep, Word blocks) {
                 return GroupedProduct{sizes, routing,  a,        permuted,   b,
                                       out,   a_scales, b_scales, out_scales, row_bytes,
                                       rows,  n,        k,        height,     pieces,
                                       half,  n_major,  tokens,   gated,      wide,
                                       home,  waits,    ends,     deep,       blocks};
             }),
             py::kw_only(), "sizes"_a, "routing"_a, "a"_a, "permuted"_a, "b"_a, "out"_a,
             "a_scales"_a, "b_scales"_a, "out_scales"_a, "row_bytes"_a, "rows"_a, "n"_a, "k"_a,
             "height"_a, "pieces"_a, "half"_a, "n_major"_a, "tokens"_a, "gated"_a, "wide"_a,
             "home"_a, "waits"_a, "ends"_a, "deep"_a, "blocks"_a);

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("load_grouped", on_device(&moe::load_grouped), "device"_a, released);
    module.def("moe_grouped", on_device(&moe::grouped), "device"_a, "world"_a, "product"_a,
               "stream"_a, released);
}

}  // namespace mkernel::hopper
