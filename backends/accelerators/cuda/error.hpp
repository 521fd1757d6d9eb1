// CUDA's error codes as exceptions, made at one place.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace mkernel::cuda {

// `what()` names the call, the code and its name.
class CudaError : public std::runtime_error {
  public:
    CudaError(const std::string& call, int code, const std::string& name)
        : std::runtime_error(call + " failed: " + name + " (" + std::to_string(code) + ")"),
          code(code) {}

    int code;
};

// Throw unless `result` is success. `call`: the function, and its arguments where that helps; as a callable,
// it is put into words only where the call failed.
[[noreturn]] void fail(cudaError_t result, const std::string& call);
[[noreturn]] void fail(CUresult result, const std::string& call);

template <class Result, class Call>
void check(Result result, const Call& call) {
    if (result == Result{}) return;
    if constexpr (std::is_invocable_v<const Call&>) {
        fail(result, call());
    } else {
        fail(result, call);
    }
}

}  // namespace mkernel::cuda
