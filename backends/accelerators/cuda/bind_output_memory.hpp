#pragma once

#include <pybind11/pybind11.h>

namespace mkernel::cuda {

void bind_output_memory(pybind11::module_& module);

}  // namespace mkernel::cuda
