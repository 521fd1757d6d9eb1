#include "backends/accelerators/cuda/host/gemm/library_product.hpp"

#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "backends/accelerators/cuda/host/bindings.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

// Calls function(*given, **named), with the values of `names`, a tuple, last.
template <std::size_t kCount>
void invoke(const py::object& function, PyObject* const (&given)[kCount], const py::tuple& names) {
    PyObject* const made = PyObject_Vectorcall(function.ptr(), given, kCount - names.size(),
                                               names.empty() ? nullptr : names.ptr());
    if (made == nullptr) throw py::error_already_set();
    Py_DECREF(made);
}

// A product by torch's functions. `more`: at most one argument of `mm`, the dtype of the result where that is
// not the inputs'. `whole`: where the product is of another dtype than `out`, makes what it is rounded from.
class TorchProduct final : public LibraryProduct {
  public:
    TorchProduct(py::object mm, py::object addmm, py::object add, py::tuple more,
                 std::optional<Allocation> whole)
        : mm_(std::move(mm)),
          addmm_(std::move(addmm)),
          add_(std::move(add)),
          more_(std::move(more)),
          whole_(std::move(whole)) {}

    // Without a bias and into a result of the product's own dtype, it makes partial results.
    void multiply(const MkernelCall& call, py::handle rows, py::handle /*scales*/, py::handle bias,
                  py::handle out) const override {
        const py::handle b = tensor_of(call, kB);
        if (!whole_) {
            if (bias.is_none()) {
                plain(rows, b, out);
            } else {
                invoke(addmm_, {bias.ptr(), rows.ptr(), b.ptr(), out.ptr()}, out_);
            }
            return;
        }
        const py::object whole = (*whole_)();
        plain(rows, b, whole);
        if (bias.is_none()) {
            out.attr("copy_")(whole);
        } else {
            invoke(add_, {whole.ptr(), bias.ptr(), out.ptr()}, out_);
        }
    }

  private:
    void plain(py::handle a, py::handle b, py::handle out) const {
        if (more_.empty()) {
            invoke(mm_, {a.ptr(), b.ptr(), out.ptr()}, out_);
        } else {
            invoke(mm_, {a.ptr(), b.ptr(), PyTuple_GET_ITEM(more_.ptr(), 0), out.ptr()}, out_);
        }
    }

    py::object mm_, addmm_, add_;
    py::tuple more_;
    std::optional<Allocation> whole_;
    py::tuple out_ = py::make_tuple("out");
};

// A product by a function of (rows, their scales, b, its scales, bias or None, out).
class ScaledProduct final : public LibraryProduct {
  public:
    explicit ScaledProduct(py::object function) : function_(std::move(function)) {}

    void multiply(const MkernelCall& call, py::handle rows, py::handle scales, py::handle bias,
                  py::handle out) const override {
        invoke(function_,
               {rows.ptr(), scales.ptr(), tensor_of(call, kB).ptr(), tensor_of(call, kBScale).ptr(),
                bias.ptr(), out.ptr()},
               none_);
    }

  private:
    py::object function_;
    py::tuple none_;
};

}  // namespace

py::object Allocation::operator()() const {
    PyObject* const made = PyObject_CallObject(function.ptr(), arguments.ptr());
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

std::optional<Allocation> allocation(const py::object& pair) {
    if (pair.is_none()) return std::nullopt;
    const py::tuple both(pair);
    if (both.size() != 2) throw py::value_error("an allocation is (function, arguments)");
    return Allocation{both[0], py::tuple(both[1])};
}

std::uint64_t address_of(const py::object& tensor) {
    return py::cast<std::uint64_t>(tensor.attr("data_ptr")());
}

void bind_products(py::module_& module) {
    py::class_<LibraryProduct, std::shared_ptr<LibraryProduct>>(module, "LibraryProduct");
    module.def(
        "torch_product",
        [](py::object mm, py::object addmm, py::object add, py::object more,
           const py::object& whole) -> std::shared_ptr<LibraryProduct> {
            py::tuple others(std::move(more));
            if (others.size() > 1) throw py::value_error("more: one argument at most");
            return std::make_shared<TorchProduct>(std::move(mm), std::move(addmm), std::move(add),
                                                  std::move(others), allocation(whole));
        },
        "mm"_a, "addmm"_a, "add"_a, "more"_a, "whole"_a);
    module.def(
        "scaled_product",
        [](py::object function) -> std::shared_ptr<LibraryProduct> {
            return std::make_shared<ScaledProduct>(std::move(function));
        },
        "function"_a);
}

}  // namespace mkernel::cuda
