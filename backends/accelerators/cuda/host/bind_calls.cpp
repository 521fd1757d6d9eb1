// The order of calls and the control block, for Python.
#include <pybind11/pybind11.h>

#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/call_order.hpp"
#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/control_block.hpp"

namespace py = pybind11;

namespace mkernel::cuda {

void bind_calls(py::module_& module) {
    py::class_<CallOrder>(module, "CallOrder")
        .def(py::init<int>(), py::arg("device"))
        .def(
            "announce_to",
            [](CallOrder& self, std::uint64_t fifo) {
                self.announce_to(reinterpret_cast<const transport::FifoHandle*>(fifo));
            },
            py::arg("fifo"))
        .def("begin", &CallOrder::begin, py::arg("stream"))
        .def("fork", &CallOrder::fork, py::arg("stream"))
        .def("join", &CallOrder::join, py::arg("stream"))
        .def("fork_kernels", &CallOrder::fork_kernels, py::arg("stream"))
        .def("join_kernels", &CallOrder::join_kernels, py::arg("stream"))
        .def("end", &CallOrder::end, py::arg("stream"))
        .def_property_readonly("latest", &CallOrder::latest)
        .def_property_readonly("captured", &CallOrder::captured)
        .def("finished", &CallOrder::finished, py::arg("call"));

    module.def("capture_of", &capture_of, py::arg("stream"));
    py::class_<Prefetch>(module, "Prefetch")
        .def(py::init(&Prefetch::of), py::arg("address"), py::arg("nbytes"));
    module.def("prefetch_in", &CallStarter::prefetch_in, py::arg("starter"), py::arg("nbytes"));
    py::class_<ControlBlock>(module, "ControlBlock")
        .def(py::init<>())
        .def_property_readonly("address", &ControlBlock::address)
        .def_property_readonly("record", &ControlBlock::record)
        .def("abort", &ControlBlock::abort, py::arg("code"));
}

}  // namespace mkernel::cuda
