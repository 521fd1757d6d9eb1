#include "backends/accelerators/cuda/host/gemm/cublas.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <type_traits>

#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

std::optional<Cublas> loaded_cublas(const std::string& library) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle == nullptr) return std::nullopt;
    const auto look_up = [&](auto& function, const char* name) {
        void* const found = dlsym(handle, name);
        if (found == nullptr) throw std::runtime_error(library + " lacks " + name);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    Cublas made{};
    look_up(made.create, "cublasCreate_v2");
    look_up(made.set_stream, "cublasSetStream_v2");
    look_up(made.set_workspace, "cublasSetWorkspace_v2");
    look_up(made.gemm, "cublasGemmEx");
    look_up(made.status_name, "cublasGetStatusName");
    return made;
}

void check(const Cublas& functions, int status, const char* call) {
    if (status != 0) throw cuda::CudaError(call, status, functions.status_name(status));
}

}  // namespace mkernel::cuda
