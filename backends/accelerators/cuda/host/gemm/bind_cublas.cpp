// Products of the library path by cuBLAS itself, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/gemm/cublas.hpp"
#include "backends/accelerators/cuda/host/gemm/cublas_handle.hpp"
#include "backends/accelerators/cuda/host/gemm/library_product.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

// The objects that a world's products share on its device. `tensor` is the memory of the workspace, followed
// by room for what calls have between product and exchange.
struct WorldCublas {
    CublasHandle& handle;
    py::object tensor;
    CublasWorkspace workspace;
    std::uint64_t room_bytes;
};

// Returns null where the process has no such library. `allocate` makes the memory.
std::shared_ptr<WorldCublas> open_cublas(int device, const std::string& library,
                                         const py::object& allocate, std::size_t workspace_bytes) {
    const std::optional<Cublas> functions = loaded_cublas(library);
    if (!functions) return nullptr;
    py::object tensor = allocate();
    const auto bytes = py::cast<std::size_t>(tensor.attr("nbytes"));
    if (bytes < workspace_bytes) throw py::value_error("less memory than the workspace takes");
    const CublasWorkspace workspace{reinterpret_cast<void*>(address_of(tensor)), workspace_bytes};
    CublasHandle* handle = nullptr;
    {
        const py::gil_scoped_release released;
        handle = &CublasHandle::of(device, *functions);
    }
    return std::make_shared<WorldCublas>(
        WorldCublas{*handle, std::move(tensor), workspace, bytes - workspace_bytes});
}

// Returns true where the environment sets the size of the workspace; torch has its own sized so, at each
// product (CublasHandlePool.cpp).
bool sized_by_environment() {
    return std::getenv("CUBLAS_WORKSPACE_CONFIG") != nullptr;
}

// Multiplies by cuBLAS where torch would call it so, else by torch. `switches`: pairs of a function of
// torch's and what it returns while it would.
class CublasProduct final : public LibraryProduct {
  public:
    CublasProduct(std::shared_ptr<LibraryProduct> torchs, std::shared_ptr<WorldCublas> world,
                  const HalfProduct& product, py::tuple switches)
        : torchs_(std::move(torchs)),
          world_(std::move(world)),
          product_(product),
          switches_(std::move(switches)) {}

    void multiply(const MkernelCall& call, py::handle rows, py::handle scales, py::handle bias,
                  py::handle out) const override {
        torchs_->multiply(call, rows, scales, bias, out);
    }

    // A single row is a vector, which torch passes to cuBLAS in another way.
    [[nodiscard]] bool takes_addresses(std::int64_t rows) const override {
        return rows >= 2 && !sized_by_environment() && !switched();
    }

    [[nodiscard]] std::uint64_t room(std::uint64_t bytes) const override {
        const CublasWorkspace& workspace = world_->workspace;
        return bytes > world_->room_bytes
                   ? 0
                   : reinterpret_cast<std::uint64_t>(workspace.at) + workspace.nbytes;
    }

    void multiply_at(const MkernelCall& call, std::uint64_t rows, std::int64_t count,
                     std::uint64_t out) const override {
        const ProductPlaces places{reinterpret_cast<const void*>(rows),
                                   reinterpret_cast<const void*>(call.addresses[kB]),
                                   reinterpret_cast<void*>(out), static_cast<int>(count)};
        const py::gil_scoped_release released;
        world_->handle.multiply(product_, places, world_->workspace, cuda::stream_at(call.stream));
    }

  private:
    [[nodiscard]] bool switched() const {
        for (const py::handle pair : switches_) {
            const auto found = py::reinterpret_steal<py::object>(
                PyObject_CallNoArgs(PyTuple_GET_ITEM(pair.ptr(), 0)));
            if (!found) throw py::error_already_set();
            const int same =
                PyObject_RichCompareBool(found.ptr(), PyTuple_GET_ITEM(pair.ptr(), 1), Py_EQ);
            if (same < 0) throw py::error_already_set();
            if (same == 0) return true;
        }
        return false;
    }

    std::shared_ptr<LibraryProduct> torchs_;
    std::shared_ptr<WorldCublas> world_;
    HalfProduct product_;
    py::tuple switches_;
};

py::tuple checked(const py::object& switches) {
    py::tuple pairs(switches);
    for (const py::handle pair : pairs) {
        if (!py::isinstance<py::tuple>(pair) || py::len(pair) != 2) {
            throw py::value_error("switches: pairs of a function and what it returns");
        }
    }
    return pairs;
}

}  // namespace

void bind_cublas(py::module_& module) {
    using Layout = std::pair<bool, int>;
    py::class_<WorldCublas, std::shared_ptr<WorldCublas>>(module, "Cublas");
    module.def("open_cublas", &open_cublas, "device"_a, "library"_a, "allocate"_a,
               "workspace_bytes"_a);
    module.def(
        "cublas_product",
        [](std::shared_ptr<LibraryProduct> torchs, std::shared_ptr<WorldCublas> world,
           bool bfloat16, bool widens, int n, int k, const Layout& a, const Layout& b,
           const py::object& switches) -> std::shared_ptr<LibraryProduct> {
            const cudaDataType_t element = bfloat16 ? CUDA_R_16BF : CUDA_R_16F;
            const HalfProduct product{element, widens ? CUDA_R_32F : element, n,
                                      k,       {a.first, a.second},           {b.first, b.second}};
            return std::make_shared<CublasProduct>(std::move(torchs), std::move(world), product,
                                                   checked(switches));
        },
        "torchs"_a, "world"_a, "bfloat16"_a, "widens"_a, "n"_a, "k"_a, "a"_a, "b"_a, "switches"_a);
}

}  // namespace mkernel::cuda
