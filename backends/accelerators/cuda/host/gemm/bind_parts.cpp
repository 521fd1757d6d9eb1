// Python bindings for the exchanges around a library's products: parts that ranks exchange, and scales.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/gemm/parts.hpp"
#include "backends/accelerators/cuda/kernels/gemm/scale_results.hpp"
#include "backends/accelerators/cuda/kernels/gemm/sum_parts.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

collectives::Parts parts_of(const std::vector<std::uint64_t>& addresses, std::uint64_t elements,
                            std::uint64_t out) {
    if (addresses.size() > static_cast<std::size_t>(kMaxRanks)) {
        throw py::value_error("a sum of " + std::to_string(addresses.size()) + " parts; at most " +
                              std::to_string(kMaxRanks));
    }
    collectives::Parts parts{};
    parts.count = static_cast<int>(addresses.size());
    std::transform(addresses.begin(), addresses.end(), parts.at,
                   [](std::uint64_t address) { return reinterpret_cast<const void*>(address); });
    parts.elements = elements;
    parts.out = reinterpret_cast<void*>(out);
    return parts;
}

}  // namespace

void bind_parts(py::module_& module) {
    module.attr("NO_FLAG") = kNoFlag;
    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("load_parts", on_device(&load_parts), "device"_a, released);
    module.def("push_part", on_device(&push_part), "device"_a, "world"_a, "peer"_a, "src"_a,
               "nbytes"_a, "to"_a, "flag"_a, "stream"_a, released);
    module.def(
        "scale_results",
        [](int device, std::uint64_t products, std::uint64_t of_rows, std::uint64_t of_columns,
           std::uint64_t out, std::uint32_t rows, std::uint32_t n, bool half, std::uint64_t stream,
           std::uint64_t bias) {
            const cuda::DeviceScope scope(device);
            const auto floats = [](std::uint64_t at) { return reinterpret_cast<const float*>(at); };
            scale_results(
                {floats(products), floats(of_rows), floats(of_columns),
                 reinterpret_cast<const void*>(bias), reinterpret_cast<void*>(out), rows, n, half},
                cuda::stream_at(stream));
        },
        "device"_a, "products"_a, "of_rows"_a, "of_columns"_a, "out"_a, "rows"_a, "n"_a, "half"_a,
        "stream"_a, "bias"_a = 0, released);
    module.def(
        "sum_parts",
        [](int device, const DeviceWorld& world, collectives::Element element,
           const std::vector<std::uint64_t>& parts, std::uint64_t elements, std::uint64_t out,
           std::uint32_t blocks, bool ends, std::uint64_t stream, std::uint64_t bias,
           std::uint32_t columns, bool tree) {
            const cuda::DeviceScope scope(device);
            collectives::Parts added = parts_of(parts, elements, out);
            added.tree = tree;
            collectives::sum_parts(workspace_of(world), limits_of(world), element, added,
                                   {reinterpret_cast<const void*>(bias), columns}, blocks, ends,
                                   cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "element"_a, "parts"_a, "elements"_a, "out"_a, "blocks"_a, "ends"_a,
        "stream"_a, "bias"_a = 0, "columns"_a = 0, "tree"_a = false, released);
}

}  // namespace mkernel::cuda
