// What starts calls of the library path without Python: torch's product and a collective of our own, one
// after the other.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_starter.hpp"
#include "backends/accelerators/hopper/kernels/collectives.hpp"
#include "backends/cuda/device.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

py::handle tensor_of(const MkernelCall& call, int which) {
    return static_cast<PyObject*>(call.tensors[which]);
}

// function(*given, **named), with the values of `names`, a tuple, last.
template <std::size_t kCount>
void invoke(const py::object& function, PyObject* const (&given)[kCount], const py::tuple& names) {
    PyObject* const made = PyObject_Vectorcall(function.ptr(), given, kCount - names.size(),
                                               names.empty() ? nullptr : names.ptr());
    if (made == nullptr) throw py::error_already_set();
    Py_DECREF(made);
}

// What makes a tensor: a function of torch's and its arguments.
struct Allocation {
    py::object function;
    py::tuple arguments;

    [[nodiscard]] py::object operator()() const {
        PyObject* const made = PyObject_CallObject(function.ptr(), arguments.ptr());
        if (made == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(made);
    }
};

// Of a pair (function, arguments), or None.
std::optional<Allocation> allocation(const py::object& pair) {
    if (pair.is_none()) return std::nullopt;
    const py::tuple both(pair);
    if (both.size() != 2) throw py::value_error("an allocation is (function, arguments)");
    return Allocation{both[0], py::tuple(both[1])};
}

// `out` = rows @ the call's b, perhaps with a bias, on torch's current stream, rounded once.
class Product {
  public:
    Product() = default;
    virtual ~Product() = default;
    Product(const Product&) = delete;
    Product& operator=(const Product&) = delete;

    // `scales`: of the rows; `bias`: either may be None.
    virtual void multiply(const MkernelCall& call, py::handle rows, py::handle scales,
                          py::handle bias, py::handle out) const = 0;
};

// By torch's functions. `more`: at most one argument of `mm`, the dtype of the result where that is not
// the inputs'. `whole`: where the product is of another dtype than `out`, makes what it is rounded from.
class TorchProduct final : public Product {
  public:
    TorchProduct(py::object mm, py::object addmm, py::object add, py::tuple more,
                 std::optional<Allocation> whole)
        : mm_(std::move(mm)),
          addmm_(std::move(addmm)),
          add_(std::move(add)),
          more_(std::move(more)),
          whole_(std::move(whole)) {}

    // Without a bias into a result of the product's own dtype: partial results.
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

// By a function of (rows, their scales, b, its scales, bias or None, out).
class ScaledProduct final : public Product {
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

void* address_of(const py::object& tensor) {
    return reinterpret_cast<void*>(py::cast<std::uint64_t>(tensor.attr("data_ptr")()));
}

// What a plan's calls have in common.
struct LibraryPlan {
    collectives::Collective together;
    collectives::Element element;
    collectives::Way way;
    bool gathers, scatters;
    std::uint64_t elements;  // of the partial results, in rows of `columns`
    std::uint32_t columns;
    std::uint64_t shard_bytes, scale_bytes;  // of a rank's `a` and of its scales
    collectives::Outs outs;
};

// `scratch()` is a tensor between the two, `scales()` one for gathered scales; torch's allocator keeps
// both in the order of the stream.
class LibraryStarter final : public CallStarter {
  public:
    LibraryStarter(int device, py::object order, py::object control,
                   std::shared_ptr<Product> product, Allocation scratch,
                   std::optional<Allocation> scales, const LibraryPlan& plan)
        : CallStarter(device, std::move(order), std::move(control)),
          product_(std::move(product)),
          scratch_(std::move(scratch)),
          scales_(std::move(scales)),
          plan_(plan) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::handle a = tensor_of(call, kA), own = tensor_of(call, kAScale);
        const py::handle bias = tensor_of(call, kBias), out = tensor_of(call, kOut);
        if (plan_.together.workspace.world == 1) {
            product_->multiply(call, a, own, bias, out);
            return;
        }
        plan_.together.limits.call = call_number(call);
        plan_.together.limits.timeout_ns = static_cast<std::uint64_t>(call.timeout_s * 1e9);
        const py::object between = scratch_();
        if (plan_.gathers) {
            const py::object scales = scales_ ? (*scales_)() : py::object(py::none());
            gather(call, address_of(between), scales_ ? address_of(scales) : nullptr);
            product_->multiply(call, between, scales, bias, out);
            return;
        }
        product_->multiply(call, a, own, py::none(), between);
        sum(call, address_of(between));
    }

    void gather(const MkernelCall& call, void* rows, void* scales) const {
        collectives::Outs whole;
        whole.at[plan_.together.workspace.rank] = rows;
        const collectives::Beside beside{reinterpret_cast<const void*>(call.addresses[kAScale]),
                                         plan_.scale_bytes, scales};
        const py::gil_scoped_release released;
        collectives::all_gather(plan_.together, reinterpret_cast<const void*>(call.addresses[kA]),
                                plan_.shard_bytes, whole, cuda::stream_at(call.stream), beside);
    }

    void sum(const MkernelCall& call, void* partials) const {
        const collectives::Collective& together = plan_.together;
        auto* const out = reinterpret_cast<void*>(call.addresses[kOut]);
        const collectives::Bias bias{reinterpret_cast<const void*>(call.addresses[kBias]),
                                     plan_.columns};
        const cudaStream_t stream = cuda::stream_at(call.stream);
        const py::gil_scoped_release released;
        if (plan_.scatters) {
            const std::uint64_t part = plan_.elements / together.workspace.world;
            collectives::reduce_scatter(together, plan_.element, partials, part, out, bias, stream);
            return;
        }
        collectives::Outs outs = plan_.outs;
        if (!outs.symmetric) outs.at[together.workspace.rank] = out;
        collectives::all_reduce(together, plan_.element, partials, plan_.elements, outs, plan_.way,
                                bias, stream);
    }

    std::shared_ptr<Product> product_;
    Allocation scratch_;
    std::optional<Allocation> scales_;
    LibraryPlan plan_;
};

LibraryPlan library_plan(const collectives::Collective& together, collectives::Element element,
                         collectives::Way way, const std::string& op, std::uint64_t elements,
                         std::uint32_t columns, std::uint64_t shard_bytes,
                         std::uint64_t scale_bytes, const std::vector<std::uint64_t>& outs) {
    if (!outs.empty() && outs.size() != static_cast<std::size_t>(together.workspace.world)) {
        throw py::value_error("outs: none, or one address a rank");
    }
    LibraryPlan plan{together,
                     element,
                     way,
                     op == "all_gather_gemm",
                     op == "gemm_reduce_scatter",
                     elements,
                     columns,
                     shard_bytes,
                     scale_bytes,
                     {}};
    plan.outs.symmetric = !outs.empty();
    std::ranges::transform(outs, plan.outs.at,
                           [](std::uint64_t at) { return reinterpret_cast<void*>(at); });
    return plan;
}

}  // namespace

void bind_library_starter(py::module_& module) {
    py::class_<Product, std::shared_ptr<Product>>(module, "LibraryProduct");
    module.def(
        "torch_product",
        [](py::object mm, py::object addmm, py::object add, py::object more,
           const py::object& whole) -> std::shared_ptr<Product> {
            py::tuple others(std::move(more));
            if (others.size() > 1) throw py::value_error("more: one argument at most");
            return std::make_shared<TorchProduct>(std::move(mm), std::move(addmm), std::move(add),
                                                  std::move(others), allocation(whole));
        },
        "mm"_a, "addmm"_a, "add"_a, "more"_a, "whole"_a);
    module.def(
        "scaled_product",
        [](py::object function) -> std::shared_ptr<Product> {
            return std::make_shared<ScaledProduct>(std::move(function));
        },
        "function"_a);
    module.def(
        "library_starter",
        [](int device, py::object order, py::object control, std::shared_ptr<Product> product,
           const py::object& scratch, const py::object& scales,
           const collectives::Collective& together, collectives::Element element,
           collectives::Way way, const std::string& op, std::uint64_t elements,
           std::uint32_t columns, std::uint64_t shard_bytes, std::uint64_t scale_bytes,
           const std::vector<std::uint64_t>& outs) {
            return CallStarter::capsule(std::make_unique<LibraryStarter>(
                device, std::move(order), std::move(control), std::move(product),
                allocation(scratch).value(), allocation(scales),
                library_plan(together, element, way, op, elements, columns, shard_bytes,
                             scale_bytes, outs)));
        },
        "device"_a, "order"_a, "control"_a, "product"_a, "scratch"_a, "scales"_a, "together"_a,
        "element"_a, "way"_a, "op"_a, "elements"_a, "columns"_a, "shard_bytes"_a, "scale_bytes"_a,
        "outs"_a);
}

}  // namespace mkernel::hopper
