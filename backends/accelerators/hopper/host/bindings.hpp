// The functions by which each `bind_*.cpp` adds to the Python module. Addresses and streams are plain
// integers; CudaError becomes Python's RuntimeError subclass of that name.
#pragma once

#include <pybind11/pybind11.h>

namespace mkernel::hopper {

void bind_calls(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_landing(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_gemm(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_parts(pybind11::module_& module);
void bind_moe(pybind11::module_& module);
void bind_starters(pybind11::module_& module);
void bind_products(pybind11::module_& module);
void bind_cublas(pybind11::module_& module);
void bind_library_starter(pybind11::module_& module);
void bind_parts_starter(pybind11::module_& module);

}  // namespace mkernel::hopper
