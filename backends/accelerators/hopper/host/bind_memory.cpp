// Devices, symmetric memory, the control block and the order of calls, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_order.hpp"
#include "backends/accelerators/hopper/host/control_block.hpp"
#include "backends/accelerators/hopper/host/device.hpp"
#include "backends/accelerators/hopper/host/memory.hpp"

namespace py = pybind11;

namespace mkernel::hopper {

void bind_memory(py::module_& module) {
    py::class_<DeviceInfo>(module, "DeviceInfo")
        .def_readonly("index", &DeviceInfo::index)
        .def_readonly("name", &DeviceInfo::name)
        .def_readonly("major", &DeviceInfo::major)
        .def_readonly("minor", &DeviceInfo::minor)
        .def_readonly("multiprocessors", &DeviceInfo::multiprocessors)
        .def_readonly("memory_bytes", &DeviceInfo::memory_bytes)
        .def_readonly("pci", &DeviceInfo::pci);
    module.def("devices", &devices);
    module.def("versions", [] {
        const Versions found = versions();
        return py::make_tuple(found.driver, found.runtime);
    });
    module.def("can_access", &can_access, py::arg("from_device"), py::arg("to_device"));

    const auto released = py::call_guard<py::gil_scoped_release>();
    py::class_<DeviceMemory>(module, "DeviceMemory")
        .def_static("create", &DeviceMemory::create, py::arg("device"), py::arg("nbytes"), released)
        .def_static("attach", &DeviceMemory::attach, py::arg("device"), py::arg("fd"),
                    py::arg("mapped"), released)
        .def_property_readonly("address", &DeviceMemory::address)
        .def_property_readonly("mapped_bytes", &DeviceMemory::mapped_bytes)
        .def_property_readonly("device", &DeviceMemory::device)
        .def_property_readonly("rdma", &DeviceMemory::rdma)
        .def("write_word", &DeviceMemory::write_word, py::arg("offset"), py::arg("value"), released)
        .def("export_fd", &DeviceMemory::export_fd)
        .def("export_dmabuf", &DeviceMemory::export_dmabuf);

    const auto stream_of = [](std::uint64_t stream) {
        return reinterpret_cast<cudaStream_t>(stream);
    };
    py::class_<CallOrder>(module, "CallOrder")
        .def(py::init<int>(), py::arg("device"))
        .def(
            "begin",
            [=](CallOrder& order, std::uint64_t stream) { order.begin(stream_of(stream)); },
            py::arg("stream"))
        .def(
            "fork",
            [=](CallOrder& order, std::uint64_t stream) {
                return reinterpret_cast<std::uint64_t>(order.fork(stream_of(stream)));
            },
            py::arg("stream"))
        .def(
            "join", [=](CallOrder& order, std::uint64_t stream) { order.join(stream_of(stream)); },
            py::arg("stream"))
        .def(
            "end",
            [=](CallOrder& order, std::uint64_t stream) { return order.end(stream_of(stream)); },
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
