// The functions by which each `bind_*.cpp` of kernels with wgmma adds to the Python module.
#pragma once

#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

void bind_gemm(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_grouped(pybind11::module_& module);
void bind_starters(pybind11::module_& module);

}  // namespace mkernel::hopper
