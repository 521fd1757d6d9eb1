// The Python module `_kernels`.
#include <pybind11/pybind11.h>

#include "backends/accelerators/cuda/host/bindings.hpp"
#ifdef MKERNEL_HOPPER_KERNELS
#include "backends/accelerators/hopper/host/bindings.hpp"
#endif

namespace py = pybind11;

PYBIND11_MODULE(_kernels, module) {
    module.doc() = "Kernels for CUDA devices.";
    // transport's types of an abort's code and diagnosis are used here.
    py::module_::import("mkernel.backends.transport._transport");
    py::module_::import(
        "mkernel.backends.accelerators.cuda._cuda");  // it makes CudaError known to Python
    mkernel::cuda::bind_calls(module);
    mkernel::cuda::bind_world(module);
    mkernel::cuda::bind_transfer(module);
    mkernel::cuda::bind_landing(module);
    mkernel::cuda::bind_collectives(
        module);                            // after DeviceWorld and RowNorm, which bind_world binds
    mkernel::cuda::bind_attention(module);  // likewise
    mkernel::cuda::bind_parts(module);      // likewise
    mkernel::cuda::bind_moe(module);        // likewise
    mkernel::cuda::bind_products(module);
    mkernel::cuda::bind_cublas(module);  // after LibraryProduct, which bind_products binds
    mkernel::cuda::bind_library_starter(module);
    mkernel::cuda::bind_parts_starter(module);
#ifdef MKERNEL_HOPPER_KERNELS
    module.attr("HOPPER") = true;
    mkernel::hopper::bind_gemm(module);
    mkernel::hopper::bind_attention(module);
    mkernel::hopper::bind_grouped(module);
    mkernel::hopper::bind_starters(module);
#else
    module.attr("HOPPER") = false;
#endif
}
