// The Python module `_hopper`.
#include <pybind11/pybind11.h>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/error.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_hopper, module) {
    module.doc() = "Kernels for GPUs of compute capability 9.0, and the memory they run on.";
    // Its types of an abort's code and diagnosis are used here.
    py::module_::import("mkernel.backends.runtime._runtime");
    py::register_exception<mkernel::hopper::CudaError>(module, "CudaError", PyExc_RuntimeError);
    mkernel::hopper::bind_memory(module);
    mkernel::hopper::bind_clock(module);
    mkernel::hopper::bind_transfer(module);
    mkernel::hopper::bind_collectives(module);
    mkernel::hopper::bind_gemm(module);
}
