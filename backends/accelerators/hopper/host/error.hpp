// CUDA's error codes as exceptions, made at one place.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace mkernel::hopper {

// `what()` names the call, the code and its name.
class CudaError : public std::runtime_error {
  public:
    CudaError(const std::string& call, int code, const std::string& name)
        : std::runtime_error(call + " failed: " + name + " (" + std::to_string(code) + ")"),
          code(code) {}

    int code;
};

// Throws unless `result` is success. `call`: the function, and what it was asked for where that
// helps.
void check(cudaError_t result, const std::string& call);
void check(CUresult result, const std::string& call);

}  // namespace mkernel::hopper
