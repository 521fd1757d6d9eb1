// The functions of cuBLAS by which products are queued, found in the library that the process has loaded,
// torch's: nothing links cuBLAS, and no header of it is needed.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <optional>
#include <string>

namespace mkernel::cuda {

// Types and numbers are those of cublas_api.h, the same since CUDA 11.
struct Cublas {
    using Handle = struct cublasContext*;
    static constexpr int kAsItLies = 0, kTransposed = 1;  // cublasOperation_t
    static constexpr int kCompute32F = 68;                // cublasComputeType_t
    static constexpr int kDefaultTensorOp = 99;           // cublasGemmAlgo_t

    int (*create)(Handle*);
    int (*set_stream)(Handle, cudaStream_t);
    int (*set_workspace)(Handle, void*, std::size_t);
    int (*gemm)(Handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                cudaDataType_t type_a, int lda, const void* b, cudaDataType_t type_b, int ldb,
                const void* beta, void* c, cudaDataType_t type_c, int ldc, int compute,
                int algorithm);
    const char* (*status_name)(int);
};

// Returns the functions of `library`, its soname or a path; none where the process has not loaded it, since
// another copy would not be torch's. std::runtime_error where it lacks a function. It is never unloaded.
std::optional<Cublas> loaded_cublas(const std::string& library);

// Throws CudaError, with the status' name, unless `status` is success.
void check(const Cublas& functions, int status, const char* call);

}  // namespace mkernel::cuda
