// Adds DeviceClock to the Python module; only where its kernels are built.
#pragma once

#include <pybind11/pybind11.h>

namespace mkernel::cuda {

void bind_clock(pybind11::module_& module);

}  // namespace mkernel::cuda
