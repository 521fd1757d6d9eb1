// The order of calls and the control block, for Python.
#include <pybind11/pybind11.h>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_order.hpp"
#include "backends/accelerators/hopper/host/control_block.hpp"
#include "backends/cuda/device.hpp"

namespace py = pybind11;

namespace mkernel::hopper {

void bind_calls(py::module_& module) {
    py::class_<CallOrder>(module, "CallOrder")
        .def(py::init<int>(), py::arg("device"))
        .def(
            "begin",
            [](CallOrder& order, std::uint64_t stream) { order.begin(cuda::stream_at(stream)); },
            py::arg("stream"))
        .def(
            "fork",
            [](CallOrder& order, std::uint64_t stream) {
                return reinterpret_cast<std::uint64_t>(order.fork(cuda::stream_at(stream)));
            },
            py::arg("stream"))
        .def(
            "join",
            [](CallOrder& order, std::uint64_t stream) { order.join(cuda::stream_at(stream)); },
            py::arg("stream"))
        .def(
            "end",
            [](CallOrder& order, std::uint64_t stream) {
                return order.end(cuda::stream_at(stream));
            },
            py::arg("stream"))
        .def("finished", &CallOrder::finished, py::arg("call"));

    py::class_<ControlBlock>(module, "ControlBlock")
        .def(py::init<>())
        .def_property_readonly("address", &ControlBlock::address)
        .def_property_readonly("failed", &ControlBlock::failed)
        .def("abort", &ControlBlock::abort, py::arg("code"))
        .def("outcome", [](const ControlBlock& control) {
            const auto [code, who] = control.outcome();
            return py::make_tuple(code, who);
        });
}

}  // namespace mkernel::hopper
