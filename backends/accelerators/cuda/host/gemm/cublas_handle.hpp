// Products of 16-bit matrices by cuBLAS, queued as torch.mm queues them, so that their bits are torch's.
//
// torch 2.11 (ATen/cuda/CUDABlas.cpp) calls cublasGemmEx, whether results are of the operands' dtype or of
// float32: row-major results are to cuBLAS the transposed ones, so the operands change places. Sums are in
// float32, the math mode is the default one, and the handle has a workspace of a size by which cuBLAS
// chooses kernels (CublasHandlePool.cpp).
//
// A world has one workspace, since its calls are ordered, and graphs keep its address until the world ends.
// Threads take turns at a device's handle without the GIL.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <mutex>

#include "backends/accelerators/cuda/host/gemm/cublas.hpp"

namespace mkernel::cuda {

// `pitch`: elements from row to row, or, of a column-major matrix, from column to column.
struct MatrixLayout {
    bool by_columns;
    int pitch;
};

// The parts that products of a plan have in common: [rows, k] @ [k, n] = [rows, n], which is packed.
struct HalfProduct {
    cudaDataType_t element, result;
    int n, k;
    MatrixLayout a, b;
};

// The places of a product's matrices, and the number of rows that two of them have.
struct ProductPlaces {
    const void* a;
    const void* b;
    void* out;
    int rows;
};

// A workspace. Products that use the same one must be ordered on their device; graphs keep its address.
struct CublasWorkspace {
    void* at;
    std::size_t nbytes;
};

// A handle of cuBLAS, for any thread. It waits for nothing but another thread's product, which is queued
// then.
class CublasHandle {
  public:
    // Makes a handle on the current device. CudaError.
    explicit CublasHandle(const Cublas& functions);
    CublasHandle(const CublasHandle&) = delete;
    CublasHandle& operator=(const CublasHandle&) = delete;

    // Returns this process's handle of a device. It is never destroyed: cublasDestroy waits for everything
    // that the device has to do, and has no deadline. `functions`: those of the first call.
    static CublasHandle& of(int device, const Cublas& functions);

    // Queues the product before it returns, also where `stream` is captured. The device is current.
    // CudaError.
    void multiply(const HalfProduct& product, const ProductPlaces& places,
                  const CublasWorkspace& workspace, cudaStream_t stream);

  private:
    void use(const CublasWorkspace& workspace, cudaStream_t stream);

    Cublas functions_;
    std::mutex turn_;
    Cublas::Handle handle_ = nullptr;
    // The stream and workspace that cuBLAS was last given; null: none.
    cudaStream_t stream_ = nullptr;
    void* workspace_ = nullptr;
};

}  // namespace mkernel::cuda
