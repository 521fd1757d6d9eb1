// The transfer engines, for Python.
#include <pybind11/pybind11.h>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/transfer/transfer.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {

void bind_transfer(py::module_& module) {
    using transfer::Engine;
    py::enum_<Engine>(module, "Engine")
        .value("copy_engine", Engine::copy_engine)
        .value("bulk", Engine::bulk)
        .value("plain", Engine::plain);
    module.def(
        "copy",
        [](std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes, Engine engine,
           std::uint32_t blocks, std::uint32_t stage_bytes, std::uint64_t stream) {
            transfer::copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes,
                           engine, {.blocks = blocks, .stage_bytes = stage_bytes},
                           cuda::stream_at(stream));
        },
        "dst"_a, "src"_a, "nbytes"_a, "engine"_a, "blocks"_a = transfer::Effort{}.blocks,
        "stage_bytes"_a = transfer::Effort{}.stage_bytes, py::kw_only(), "stream"_a,
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace mkernel::cuda
