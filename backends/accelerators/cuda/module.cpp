// The Python module `_cuda`. Addresses and streams are plain integers; CudaError becomes Python's
// RuntimeError subclass of that name, also where a module that imports this one throws it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backends/accelerators/cuda/bind_clock.hpp"
#include "backends/accelerators/cuda/bind_output_memory.hpp"
#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/device_fifo.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/memory.hpp"
#include "backends/accelerators/cuda/mover.hpp"
#include "backends/accelerators/cuda/stream_ops.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

void bind_devices(py::module_& module) {
    py::class_<DeviceInfo>(module, "DeviceInfo")
        .def_readonly("index", &DeviceInfo::index)
        .def_readonly("name", &DeviceInfo::name)
        .def_readonly("major", &DeviceInfo::major)
        .def_readonly("minor", &DeviceInfo::minor)
        .def_readonly("multiprocessors", &DeviceInfo::multiprocessors)
        .def_readonly("clock_mhz", &DeviceInfo::clock_mhz)
        .def_readonly("memory_gbs", &DeviceInfo::memory_gbs)
        .def_readonly("pci", &DeviceInfo::pci)
        .def_readonly("mps", &DeviceInfo::mps)
        .def_readonly("out_of_reach", &DeviceInfo::out_of_reach);
    module.def("devices", &devices);
    module.def("versions", &versions);
}

void bind_memory(py::module_& module) {
    const auto released = py::call_guard<py::gil_scoped_release>();
    py::class_<DeviceMemory, std::shared_ptr<DeviceMemory>>(module, "DeviceMemory")
        .def_static("create", &DeviceMemory::create, "device"_a, "nbytes"_a, released)
        .def_static("attach", &DeviceMemory::attach, "device"_a, "fd"_a, "mapped"_a, released)
        .def_property_readonly("address", &DeviceMemory::address)
        .def_property_readonly("mapped_bytes", &DeviceMemory::mapped_bytes)
        .def_property_readonly("device", &DeviceMemory::device)
        .def("write_word", &DeviceMemory::write_word, "offset"_a, "value"_a, released)
        .def("export_fd", &DeviceMemory::export_fd)
        .def("export_dmabuf", &DeviceMemory::export_dmabuf);
}

void bind_mover(py::module_& module) {
    module.def("mover", [] { return reinterpret_cast<std::uintptr_t>(mover()); });
    py::class_<GpuDirect>(module, "GpuDirect")
        .def_readonly("dmabuf", &GpuDirect::dmabuf)
        .def_readonly("ordered", &GpuDirect::ordered)
        .def_readonly("flushes", &GpuDirect::flushes);
    module.def("gpu_direct", &gpu_direct, "device"_a);
    module.def(
        "device_flush",
        [](int device) { return reinterpret_cast<std::uintptr_t>(device_flush(device)); },
        "device"_a);
}

void bind_fifo(py::module_& module) {
    py::class_<DeviceFifo>(module, "DeviceFifo")
        .def(py::init<std::uint64_t, int>(), "fifo"_a, "device"_a,
             py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("handle", [](const DeviceFifo& fifo) {
            return reinterpret_cast<std::uint64_t>(&fifo.handle());
        });
}

void bind_copies(py::module_& module) {
    module.def("copy", &copy, "dst"_a, "src"_a, "nbytes"_a, py::kw_only(), "stream"_a,
               py::call_guard<py::gil_scoped_release>());
    py::class_<MappedPages>(module, "MappedPages")
        .def(py::init<std::uint64_t, std::size_t>(), "address"_a, "nbytes"_a);
    module.def("write_word", &write_word, "address"_a, "value"_a, py::kw_only(), "stream"_a);
    module.def("wait_word", &wait_word, "device"_a, "address"_a, "value"_a, py::kw_only(),
               "stream"_a);
}

}  // namespace
}  // namespace mkernel::cuda

PYBIND11_MODULE(_cuda, module) {
    module.doc() = "Memory that peers map, copies and signals on CUDA devices.";
    py::register_exception<mkernel::cuda::CudaError>(module, "CudaError", PyExc_RuntimeError);
    mkernel::cuda::bind_devices(module);
    mkernel::cuda::bind_memory(module);
    mkernel::cuda::bind_output_memory(module);
    mkernel::cuda::bind_mover(module);
    mkernel::cuda::bind_fifo(module);
    mkernel::cuda::bind_copies(module);
#ifdef MKERNEL_CUDA_KERNELS
    mkernel::cuda::bind_clock(module);
#endif
}
