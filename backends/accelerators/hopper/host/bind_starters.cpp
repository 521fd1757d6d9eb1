// What starts calls of a plan without Python: one starter for the fused path's kernels each, and one
// for the library path, whose product is torch's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_starter.hpp"
#include "backends/accelerators/hopper/host/few_rows.hpp"
#include "backends/accelerators/hopper/host/pipelined.hpp"
#include "backends/accelerators/hopper/kernels/collectives.hpp"
#include "backends/cuda/device.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

// Of a GEMM op's tensors; there may be no bias.
enum : int { kA, kB, kBias, kOut };

// What lies so differs from call to call in its addresses alone.
struct Pitches {
    std::int64_t a, b;

    [[nodiscard]] CallOnce call_once(const MkernelCall& call) const {
        const std::uint64_t* const at = call.addresses;
        return {call_number(call),
                call.timeout_s,
                {at[kA], at[kB], at[kOut], at[kBias], a, b},
                call.stream};
    }
};

// Of calls that differ in their tensors' addresses alone: PipelinedGather, FewRowsCalls.
template <class Calls>
class TensorStarter final : public CallStarter {
  public:
    TensorStarter(int device, py::object order, py::object control, py::object calls,
                  Pitches pitches)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<Calls&>()),
          pitches_(pitches) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release
            released;  // the launch may wait for room in the device's queue
        calls_.start(pitches_.call_once(call));
    }

    py::object kept_;
    Calls& calls_;
    Pitches pitches_;
};

class ReduceStarter final : public CallStarter {
  public:
    ReduceStarter(int device, py::object order, py::object control, py::object calls,
                  Pitches pitches, std::vector<std::uint64_t> outs)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<PipelinedReduce&>()),
          pitches_(pitches),
          outs_(std::move(outs)) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        calls_.start(pitches_.call_once(call), outs_);
    }

    py::object kept_;
    PipelinedReduce& calls_;
    Pitches pitches_;
    std::vector<std::uint64_t> outs_;
};

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

// Torch's functions of these names.
struct TorchFunctions {
    py::object mm, addmm, add;
};

// `out` = a @ b, perhaps with a bias, by torch on its current stream, rounded once. `more`: at most one
// argument of `mm`, the dtype of the result where that is not the inputs'. `whole`: where the product
// is of another dtype than `out`, makes what it is rounded from.
class Multiply {
  public:
    Multiply(TorchFunctions torch, py::tuple more, std::optional<Allocation> whole)
        : torch_(std::move(torch)), more_(std::move(more)), whole_(std::move(whole)) {}

    void operator()(py::handle a, py::handle b, py::handle out) const {
        if (!whole_) {
            multiply(a, b, out);
            return;
        }
        const py::object whole = (*whole_)();
        multiply(a, b, whole);
        out.attr("copy_")(whole);
    }

    // `bias` may be None.
    void operator()(py::handle a, py::handle b, py::handle bias, py::handle out) const {
        if (bias.is_none()) {
            (*this)(a, b, out);
        } else if (!whole_) {
            into(out, torch_.addmm, {bias.ptr(), a.ptr(), b.ptr()});
        } else {
            const py::object whole = (*whole_)();
            multiply(a, b, whole);
            into(out, torch_.add, {whole.ptr(), bias.ptr()});
        }
    }

  private:
    static constexpr std::size_t kMost = 3;  // arguments beside out

    void multiply(py::handle a, py::handle b, py::handle out) const {
        if (more_.empty()) {
            into(out, torch_.mm, {a.ptr(), b.ptr()});
        } else {
            into(out, torch_.mm, {a.ptr(), b.ptr(), PyTuple_GET_ITEM(more_.ptr(), 0)});
        }
    }

    // function(*given, out=out)
    void into(py::handle out, const py::object& function,
              std::initializer_list<PyObject*> given) const {
        PyObject* arguments[kMost + 1];
        PyObject** const end = std::copy(given.begin(), given.end(), arguments);
        *end = out.ptr();
        PyObject* const made =
            PyObject_Vectorcall(function.ptr(), arguments, given.size(), names_.ptr());
        if (made == nullptr) throw py::error_already_set();
        Py_DECREF(made);
    }

    TorchFunctions torch_;
    py::tuple more_;
    std::optional<Allocation> whole_;
    py::tuple names_ = py::make_tuple("out");
};

// Of a pair (function, arguments).
Allocation allocation(const py::object& pair) {
    const py::tuple both(pair);
    if (both.size() != 2) throw py::value_error("an allocation is (function, arguments)");
    return {both[0], py::tuple(both[1])};
}

py::handle tensor_of(const MkernelCall& call, int which) {
    return static_cast<PyObject*>(call.tensors[which]);
}

// The product and a collective of our own, one after the other; `scratch()` is a tensor between them,
// which torch's allocator keeps in the order of the stream.
class LibraryStarter final : public CallStarter {
  public:
    // `elements`: of the partial results, in rows of `columns`; `shard_bytes`: of a rank's `a`.
    LibraryStarter(int device, py::object order, py::object control, Multiply multiply,
                   Allocation scratch, const collectives::Collective& together,
                   collectives::Element element, collectives::Way way, const std::string& op,
                   std::uint64_t elements, std::uint32_t columns, std::uint64_t shard_bytes,
                   std::vector<std::uint64_t> outs)
        : CallStarter(device, std::move(order), std::move(control)),
          multiply_(std::move(multiply)),
          scratch_(std::move(scratch)),
          together_(together),
          element_(element),
          way_(way),
          gathers_(op == "all_gather_gemm"),
          scatters_(op == "gemm_reduce_scatter"),
          elements_(elements),
          columns_(columns),
          shard_bytes_(shard_bytes) {
        outs_.symmetric = !outs.empty();
        for (std::size_t rank = 0; rank < outs.size(); ++rank) {
            outs_.at[rank] = reinterpret_cast<void*>(outs[rank]);
        }
    }

  private:
    void queue(const MkernelCall& call) override {
        const int rank = together_.workspace.rank;
        if (together_.workspace.world == 1) {
            multiply_(tensor_of(call, kA), tensor_of(call, kB), tensor_of(call, kBias),
                      tensor_of(call, kOut));
            return;
        }
        const py::object between = scratch_();
        const auto address = py::cast<std::uint64_t>(between.attr("data_ptr")());
        auto* const scratch = reinterpret_cast<void*>(address);
        auto* const out = reinterpret_cast<void*>(call.addresses[kOut]);
        together_.limits.call = call_number(call);
        together_.limits.timeout_ns = static_cast<std::uint64_t>(call.timeout_s * 1e9);
        const cudaStream_t stream = cuda::stream_at(call.stream);
        if (gathers_) {
            collectives::Outs whole;
            whole.at[rank] = scratch;
            const auto* const rows = reinterpret_cast<const void*>(call.addresses[kA]);
            {
                const py::gil_scoped_release released;
                collectives::all_gather(together_, rows, shard_bytes_, whole, stream);
            }
            multiply_(between, tensor_of(call, kB), tensor_of(call, kBias), tensor_of(call, kOut));
            return;
        }
        multiply_(tensor_of(call, kA), tensor_of(call, kB), between);
        const collectives::Bias bias{reinterpret_cast<const void*>(call.addresses[kBias]),
                                     columns_};
        const py::gil_scoped_release released;
        if (scatters_) {
            const std::uint64_t part = elements_ / together_.workspace.world;
            collectives::reduce_scatter(together_, element_, scratch, part, out, bias, stream);
            return;
        }
        collectives::Outs outs = outs_;
        if (!outs.symmetric) outs.at[rank] = out;
        collectives::all_reduce(together_, element_, scratch, elements_, outs, way_, bias, stream);
    }

    Multiply multiply_;
    Allocation scratch_;
    collectives::Collective together_;
    collectives::Element element_;
    collectives::Way way_;
    bool gathers_, scatters_;
    std::uint64_t elements_;
    std::uint32_t columns_;
    std::uint64_t shard_bytes_;
    collectives::Outs outs_;
};

template <class Calls>
void def_tensor_starter(py::module_& module, const char* name) {
    module.def(
        name,
        [](int device, py::object order, py::object control, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch) {
            return CallStarter::capsule(std::make_unique<TensorStarter<Calls>>(
                device, std::move(order), std::move(control), std::move(calls),
                Pitches{a_pitch, b_pitch}));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a);
}

}  // namespace

void bind_starters(py::module_& module) {
    def_tensor_starter<PipelinedGather>(module, "gather_starter");
    def_tensor_starter<FewRowsCalls>(module, "few_rows_starter");
    module.def(
        "reduce_starter",
        [](int device, py::object order, py::object control, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch, std::vector<std::uint64_t> outs) {
            return CallStarter::capsule(std::make_unique<ReduceStarter>(
                device, std::move(order), std::move(control), std::move(calls),
                Pitches{a_pitch, b_pitch}, std::move(outs)));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a, "outs"_a);
    module.def(
        "library_starter",
        [](int device, py::object order, py::object control, py::object mm, py::object addmm,
           py::object add, py::object more, py::object whole, py::object scratch,
           const collectives::Collective& together, collectives::Element element,
           collectives::Way way, const std::string& op, std::uint64_t elements,
           std::uint32_t columns, std::uint64_t shard_bytes, std::vector<std::uint64_t> outs) {
            py::tuple others(std::move(more));
            if (others.size() > 1) throw py::value_error("more: one argument at most");
            if (!outs.empty() &&
                outs.size() != static_cast<std::size_t>(together.workspace.world)) {
                throw py::value_error("outs: none, or one address a rank");
            }
            std::optional<Allocation> rounded_from;
            if (!whole.is_none()) rounded_from = allocation(whole);
            return CallStarter::capsule(std::make_unique<LibraryStarter>(
                device, std::move(order), std::move(control),
                Multiply({std::move(mm), std::move(addmm), std::move(add)}, std::move(others),
                         std::move(rounded_from)),
                allocation(scratch), together, element, way, op, elements, columns, shard_bytes,
                std::move(outs)));
        },
        "device"_a, "order"_a, "control"_a, "mm"_a, "addmm"_a, "add"_a, "more"_a, "whole"_a,
        "scratch"_a, "together"_a, "element"_a, "way"_a, "op"_a, "elements"_a, "columns"_a,
        "shard_bytes"_a, "outs"_a);
}

}  // namespace mkernel::hopper
