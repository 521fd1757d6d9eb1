// Python's ends of the command FIFO, as a part of the module `_transport`.
#pragma once

#include <pybind11/pybind11.h>

namespace mkernel::transport {

void bind_fifo(pybind11::module_& module);

}  // namespace mkernel::transport
