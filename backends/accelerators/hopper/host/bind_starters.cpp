// What starts calls of a plan without Python: one starter for the fused path's kernels each, and one
// for the library path, whose product is torch's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_starter.hpp"
#include "backends/accelerators/hopper/host/pipelined.hpp"
#include "backends/accelerators/hopper/kernels/collectives.hpp"
#include "backends/cuda/device.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

// Of a GEMM op's tensors.
enum : int { kA, kB, kOut };

CallOnce call_once(const MkernelCall& call) {
    return {call_number(call),  call.timeout_s,       call.addresses[kA],
            call.addresses[kB], call.addresses[kOut], call.stream};
}

class GatherStarter final : public CallStarter {
  public:
    GatherStarter(int device, py::object order, py::object control, py::object calls)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<PipelinedGather&>()) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release
            released;  // the launch may wait for room in the device's queue
        calls_.start(call_once(call));
    }

    py::object kept_;
    PipelinedGather& calls_;
};

class ReduceStarter final : public CallStarter {
  public:
    ReduceStarter(int device, py::object order, py::object control, py::object calls,
                  std::vector<std::uint64_t> outs)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<PipelinedReduce&>()),
          outs_(std::move(outs)) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        calls_.start(call_once(call), outs_);
    }

    py::object kept_;
    PipelinedReduce& calls_;
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

// `mm(a, b, *more, out=out)`, as torch's function takes it, on torch's current stream. `whole`: where
// the product is of another dtype than `out`, makes what it is rounded from.
class Multiply {
  public:
    Multiply(py::object mm, py::tuple more, std::optional<Allocation> whole)
        : mm_(std::move(mm)), more_(std::move(more)), whole_(std::move(whole)) {}

    void operator()(py::handle a, py::handle b, py::handle out) const {
        if (!whole_) {
            multiply(a, b, out);
            return;
        }
        const py::object whole = (*whole_)();
        multiply(a, b, whole);
        out.attr("copy_")(whole);
    }

  private:
    void multiply(py::handle a, py::handle b, py::handle out) const {
        PyObject* arguments[4] = {a.ptr(), b.ptr()};
        std::size_t count = 2;
        for (const py::handle each : more_) arguments[count++] = each.ptr();
        arguments[count] = out.ptr();
        PyObject* const made = PyObject_Vectorcall(mm_.ptr(), arguments, count, names_.ptr());
        if (made == nullptr) throw py::error_already_set();
        Py_DECREF(made);
    }

    py::object mm_;
    py::tuple more_;  // at most one: the dtype of the result, where that is not the inputs'
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
    // `elements`: of the partial results; `shard_bytes`: of a rank's `a`.
    LibraryStarter(int device, py::object order, py::object control, Multiply multiply,
                   Allocation scratch, const collectives::Collective& together,
                   collectives::Element element, collectives::Way way, const std::string& op,
                   std::uint64_t elements, std::uint64_t shard_bytes,
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
            multiply_(tensor_of(call, kA), tensor_of(call, kB), tensor_of(call, kOut));
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
            multiply_(between, tensor_of(call, kB), tensor_of(call, kOut));
            return;
        }
        multiply_(tensor_of(call, kA), tensor_of(call, kB), between);
        const py::gil_scoped_release released;
        if (scatters_) {
            const std::uint64_t part = elements_ / together_.workspace.world;
            collectives::reduce_scatter(together_, element_, scratch, part, out, stream);
            return;
        }
        collectives::Outs outs = outs_;
        if (!outs.symmetric) outs.at[rank] = out;
        collectives::all_reduce(together_, element_, scratch, elements_, outs, way_, stream);
    }

    Multiply multiply_;
    Allocation scratch_;
    collectives::Collective together_;
    collectives::Element element_;
    collectives::Way way_;
    bool gathers_, scatters_;
    std::uint64_t elements_, shard_bytes_;
    collectives::Outs outs_;
};

}  // namespace

void bind_starters(py::module_& module) {
    module.def(
        "gather_starter",
        [](int device, py::object order, py::object control, py::object calls) {
            return CallStarter::capsule(std::make_unique<GatherStarter>(
                device, std::move(order), std::move(control), std::move(calls)));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a);
    module.def(
        "reduce_starter",
        [](int device, py::object order, py::object control, py::object calls,
           std::vector<std::uint64_t> outs) {
            return CallStarter::capsule(std::make_unique<ReduceStarter>(
                device, std::move(order), std::move(control), std::move(calls), std::move(outs)));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a, "outs"_a);
    module.def(
        "library_starter",
        [](int device, py::object order, py::object control, py::object mm, py::object more,
           py::object whole, py::object scratch, const collectives::Collective& together,
           collectives::Element element, collectives::Way way, const std::string& op,
           std::uint64_t elements, std::uint64_t shard_bytes, std::vector<std::uint64_t> outs) {
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
                Multiply(std::move(mm), std::move(others), std::move(rounded_from)),
                allocation(scratch), together, element, way, op, elements, shard_bytes,
                std::move(outs)));
        },
        "device"_a, "order"_a, "control"_a, "mm"_a, "more"_a, "whole"_a, "scratch"_a, "together"_a,
        "element"_a, "way"_a, "op"_a, "elements"_a, "shard_bytes"_a, "outs"_a);
}

}  // namespace mkernel::hopper
