// What cuBLAS is told of a product, by a stand-in for its library; who finds the library; failures by name.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/host/gemm/cublas.hpp"
#include "backends/accelerators/cuda/host/gemm/cublas_handle.hpp"
#include "tests/native/hopper/fake_cublas.hpp"
#include "tests/native/nics/check.hpp"

using namespace mkernel::cuda;
using mkernel::nics::testing::library;

namespace {

// An address that nothing reads.
void* at(std::uintptr_t number) {
    return reinterpret_cast<void*>(number << 8);
}
cudaStream_t stream(std::uintptr_t number) {
    return static_cast<cudaStream_t>(at(number));
}

constexpr std::size_t kBytes = 32 << 20;

// [rows, 72] @ [72, 40], all row-major.
constexpr HalfProduct kProduct{CUDA_R_16BF, CUDA_R_16BF, 40, 72, {false, 72}, {false, 40}};
const ProductPlaces kPlaces{at(1), at(2), at(3), 6};
const CublasWorkspace kWorkspace{at(4), kBytes};

// The stand-in, as torch would have loaded it, with nothing noted.
class Loaded {
  public:
    Loaded() : handle_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) throw std::runtime_error(dlerror());
        const auto look_up = reinterpret_cast<Asked* (*)()>(dlsym(handle_, "fake_cublas_asked"));
        if (look_up == nullptr) throw std::runtime_error(dlerror());
        asked = look_up();
        *asked = {};
    }

    Asked* asked;

  private:
    void* handle_;  // stays loaded
};

std::string what_fails(CublasHandle& handle) {
    try {
        handle.multiply(kProduct, kPlaces, kWorkspace, stream(5));
    } catch (const mkernel::cuda::CudaError& error) {
        CHECK(error.code == kFails);
        return error.what();
    }
    return "nothing";
}

TEST(a_library_that_is_not_loaded_is_not_taken) {
    CHECK(!loaded_cublas("libcublas.so.0"));
    CHECK(!loaded_cublas(library));  // it is there, but the process has not loaded it
    const Loaded loaded;
    CHECK(loaded_cublas(library).has_value());
}

TEST(a_library_that_lacks_a_function_is_named) {
    try {
        CHECK(!loaded_cublas("libc.so.6"));
        CHECK(false);
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()) == "libc.so.6 lacks cublasCreate_v2");
    }
}

TEST(row_major_results_are_transposed_products) {
    const Loaded loaded;
    CublasHandle handle(*loaded_cublas(library));
    handle.multiply(kProduct, kPlaces, kWorkspace, stream(5));
    CHECK(loaded.asked->handles == 1);
    CHECK(loaded.asked->products.size() == 1);
    const AskedProduct& asked = loaded.asked->products.front();
    CHECK(asked.op_a == 0 && asked.op_b == 0);  // CUBLAS_OP_N
    CHECK(asked.m == 40 && asked.n == 6 && asked.k == 72);
    CHECK(asked.alpha == 1 && asked.beta == 0);
    CHECK(asked.a == at(2) && asked.lda == 40);
    CHECK(asked.b == at(1) && asked.ldb == 72);
    CHECK(asked.c == at(3) && asked.ldc == 40);
    CHECK(asked.type_a == CUDA_R_16BF && asked.type_b == CUDA_R_16BF);
    CHECK(asked.type_c == CUDA_R_16BF);
    CHECK(asked.compute == 68 && asked.algorithm == 99);  // CUBLAS_COMPUTE_32F, _DEFAULT_TENSOR_OP
    CHECK(asked.stream == stream(5));
    CHECK(asked.workspace == at(4) && asked.workspace_bytes == kBytes);
}

TEST(layouts_pitches_and_dtypes) {
    const Loaded loaded;
    CublasHandle handle(*loaded_cublas(library));
    for (const bool a : {false, true}) {
        for (const bool b : {false, true}) {
            const HalfProduct product{CUDA_R_16F, CUDA_R_32F, 40, 72, {a, 96}, {b, 128}};
            handle.multiply(product, kPlaces, kWorkspace, stream(5));
            const AskedProduct& asked = loaded.asked->products.back();
            CHECK(asked.op_a == b && asked.op_b == a);  // CUBLAS_OP_T where it lies by columns
            CHECK(asked.lda == 128 && asked.ldb == 96 && asked.ldc == 40);
            CHECK(asked.type_a == CUDA_R_16F && asked.type_b == CUDA_R_16F);
            CHECK(asked.type_c == CUDA_R_32F);
        }
    }
}

TEST(stream_and_workspace_are_told_where_they_change) {
    const Loaded loaded;
    CublasHandle handle(*loaded_cublas(library));
    struct Turn {
        std::uintptr_t stream, workspace;
        int told;
    };
    // The default stream is null. A new stream takes the workspace away, so both are told.
    for (const Turn& turn :
         std::array<Turn, 6>{{{0, 4, 1}, {0, 4, 1}, {5, 4, 2}, {5, 4, 2}, {5, 6, 3}, {0, 4, 4}}}) {
        handle.multiply(kProduct, kPlaces, {at(turn.workspace), kBytes}, stream(turn.stream));
        const AskedProduct& asked = loaded.asked->products.back();
        CHECK(asked.stream == at(turn.stream));
        CHECK(asked.workspace == at(turn.workspace) && asked.workspace_bytes == kBytes);
        CHECK(loaded.asked->streams == turn.told && loaded.asked->workspaces == turn.told);
    }
}

TEST(failures_have_names) {
    const Loaded loaded;
    const Cublas functions = *loaded_cublas(library);
    CublasHandle handle(functions);
    for (const std::string name : {"cublasSetStream", "cublasSetWorkspace", "cublasGemmEx"}) {
        loaded.asked->fails = name;
        CHECK(what_fails(handle) == name + " failed: CUBLAS_STATUS_EXECUTION_FAILED (13)");
        loaded.asked->fails.clear();
    }
    // What was told before a failure is told again.
    CHECK(what_fails(handle) == "nothing");
    CHECK(loaded.asked->products.back().workspace == at(4));
    loaded.asked->fails = "cublasCreate";
    try {
        const CublasHandle none(functions);
        CHECK(false);
    } catch (const mkernel::cuda::CudaError& error) {
        CHECK(std::string(error.what()).starts_with("cublasCreate failed"));
    }
}

TEST(a_workspace_that_was_refused_is_told_again) {
    const Loaded loaded;
    CublasHandle handle(*loaded_cublas(library));
    handle.multiply(kProduct, kPlaces, kWorkspace, stream(7));
    loaded.asked->fails = "cublasSetWorkspace";
    CHECK(what_fails(handle) != "nothing");  // on stream 5
    loaded.asked->fails.clear();
    handle.multiply(kProduct, kPlaces, kWorkspace, stream(7));
    CHECK(loaded.asked->products.back().stream == stream(7));
    CHECK(loaded.asked->products.back().workspace == at(4));
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run_on_library(argc, argv);
}
