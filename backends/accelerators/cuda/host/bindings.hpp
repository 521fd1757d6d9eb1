// The functions by which each `bind_*.cpp` adds to the Python module, and what they share. Addresses and
// streams are plain integers; CudaError becomes Python's RuntimeError subclass of that name.
#pragma once

#include <pybind11/pybind11.h>

#include "backends/accelerators/cuda/device.hpp"

namespace mkernel::cuda {

void bind_calls(pybind11::module_& module);
void bind_world(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_landing(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_parts(pybind11::module_& module);
void bind_moe(pybind11::module_& module);
void bind_products(pybind11::module_& module);
void bind_cublas(pybind11::module_& module);
void bind_library_starter(pybind11::module_& module);
void bind_parts_starter(pybind11::module_& module);

// Wraps `function` so that it takes a device before its other arguments, which is the current one during the
// call.
template <class... Arguments>
auto on_device(void (*function)(Arguments...)) {
    return [function](int device, Arguments... arguments) {
        const cuda::DeviceScope scope(device);
        function(arguments...);
    };
}

}  // namespace mkernel::cuda
