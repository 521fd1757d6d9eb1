#include "backends/accelerators/cuda/host/gemm/cublas_handle.hpp"

#include <map>
#include <memory>

#include "backends/accelerators/cuda/device.hpp"

namespace mkernel::cuda {

namespace {

int operation(const MatrixLayout& layout) {
    return layout.by_columns ? Cublas::kTransposed : Cublas::kAsItLies;
}

}  // namespace

CublasHandle::CublasHandle(const Cublas& functions) : functions_(functions) {
    check(functions_, functions_.create(&handle_), "cublasCreate");
}

CublasHandle& CublasHandle::of(int device, const Cublas& functions) {
    static auto& handles = *new std::map<int, std::unique_ptr<CublasHandle>>;
    static std::mutex turn;
    const std::scoped_lock lock(turn);
    std::unique_ptr<CublasHandle>& found = handles[device];
    if (found == nullptr) {
        const cuda::DeviceScope scope(device);
        const cuda::OutsideCapture outside;
        found = std::make_unique<CublasHandle>(functions);
    }
    return *found;
}

void CublasHandle::multiply(const HalfProduct& product, const ProductPlaces& places,
                            const CublasWorkspace& workspace, cudaStream_t stream) {
    const float one = 1, none = 0;
    const std::scoped_lock lock(turn_);
    use(workspace, stream);
    const auto& [element, result, n, k, a, b] = product;
    check(functions_,
          functions_.gemm(handle_, operation(b), operation(a), n, places.rows, k, &one, places.b,
                          element, b.pitch, places.a, element, a.pitch, &none, places.out, result,
                          n, Cublas::kCompute32F, Cublas::kDefaultTensorOp),
          "cublasGemmEx");
}

void CublasHandle::use(const CublasWorkspace& workspace, cudaStream_t stream) {
    if (workspace.at == workspace_ && stream == stream_) return;
    workspace_ = nullptr;
    check(functions_, functions_.set_stream(handle_, stream), "cublasSetStream");
    // Set after the stream, since setting a stream gives cuBLAS a workspace of its own.
    check(functions_, functions_.set_workspace(handle_, workspace.at, workspace.nbytes),
          "cublasSetWorkspace");
    stream_ = stream;
    workspace_ = workspace.at;
}

}  // namespace mkernel::cuda
