// Stands for cuBLAS: exports its functions by name, as cublas_api.h has them, and notes what they are told.
#include "tests/native/hopper/fake_cublas.hpp"

#define FAKE_CUBLAS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Handle {
    void* stream = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
};

Asked& asked() {
    static Asked all;
    return all;
}

int answer(const char* function) {
    return asked().fails == function ? kFails : 0;
}

}  // namespace

FAKE_CUBLAS_EXPORT Asked* fake_cublas_asked() {
    return &asked();
}

FAKE_CUBLAS_EXPORT int cublasCreate_v2(Handle** handle) {
    static Handle only;
    *handle = &only;
    ++asked().handles;
    return answer("cublasCreate");
}

FAKE_CUBLAS_EXPORT int cublasSetStream_v2(Handle* handle, void* stream) {
    *handle = {stream};  // cuBLAS goes back to a workspace of its own
    ++asked().streams;
    return answer("cublasSetStream");
}

FAKE_CUBLAS_EXPORT int cublasSetWorkspace_v2(Handle* handle, void* workspace, std::size_t nbytes) {
    handle->workspace = workspace;
    handle->workspace_bytes = nbytes;
    ++asked().workspaces;
    return answer("cublasSetWorkspace");
}

FAKE_CUBLAS_EXPORT int cublasGemmEx(Handle* handle, int op_a, int op_b, int m, int n, int k,
                                    const void* alpha, const void* a, int type_a, int lda,
                                    const void* b, int type_b, int ldb, const void* beta, void* c,
                                    int type_c, int ldc, int compute, int algorithm) {
    asked().products.push_back({handle,
                                op_a,
                                op_b,
                                m,
                                n,
                                k,
                                *static_cast<const float*>(alpha),
                                *static_cast<const float*>(beta),
                                a,
                                type_a,
                                lda,
                                b,
                                type_b,
                                ldb,
                                c,
                                type_c,
                                ldc,
                                compute,
                                algorithm,
                                handle->stream,
                                handle->workspace,
                                handle->workspace_bytes});
    return answer("cublasGemmEx");
}

FAKE_CUBLAS_EXPORT const char* cublasGetStatusName(int status) {
    return status == kFails ? "CUBLAS_STATUS_EXECUTION_FAILED" : "CUBLAS_STATUS_UNKNOWN";
}
