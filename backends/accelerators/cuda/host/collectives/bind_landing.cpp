// Python bindings for the outputs that plans publish to their peers.
#include <pybind11/pybind11.h>

#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/collectives/landing.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {

void bind_landing(py::module_& module) {
    py::class_<Landings>(module, "Landings")
        .def(py::init<>())
        .def_readonly("own", &Landings::own)
        .def_readonly("told", &Landings::told);
    py::class_<Outputs>(module, "Outputs")
        .def(py::init<>())
        .def(py::init([](const std::shared_ptr<cuda::OutputMemory>& memory, int world,
                         std::size_t bytes) { return Outputs(memory, world, bytes); }),
             "memory"_a, "world"_a, "bytes"_a)
        .def("landings", &Outputs::landings, "out"_a);
}

}  // namespace mkernel::cuda
