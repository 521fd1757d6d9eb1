// Collectives without a product, and norms of sums, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/collectives/landing.hpp"
#include "backends/accelerators/cuda/host/collectives/summed_rows.hpp"
#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"
#include "backends/accelerators/cuda/kernels/collectives/sum_rows.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

using collectives::Collective;
using collectives::Outs;

Collective collective(const DeviceWorld& world, std::uint64_t staging_bytes, std::uint64_t staging,
                      std::uint32_t blocks, bool by_mail, bool tree) {
    return {.workspace = workspace_of(world),
            .limits = limits_of(world),
            .staging = staging,
            .staging_bytes = staging_bytes,
            .blocks = blocks,
            .by_mail = by_mail,
            .tree = tree};
}

Collective of_call(Collective call, std::uint32_t number, double timeout_s,
                   const Landings& landings, const Prefetch& prefetch) {
    call.landings = landings;
    call.prefetch = prefetch;
    call.limits.call = number;
    call.limits.timeout_ns = static_cast<std::uint64_t>(timeout_s * 1e9);
    return call;
}

// One address: the rank's own; as many as ranks: symmetric.
Outs outs(const Collective& call, const std::vector<std::uint64_t>& addresses) {
    const auto world = static_cast<std::size_t>(call.workspace.world);
    if (addresses.size() != 1 && addresses.size() != world) {
        throw py::value_error("out has " + std::to_string(addresses.size()) +
                              " addresses; expected 1 or " + std::to_string(world));
    }
    Outs made;
    made.symmetric = world > 1 && addresses.size() == world;
    if (!made.symmetric) {
        made.at[call.workspace.rank] = reinterpret_cast<void*>(addresses[0]);
        return made;
    }
    for (std::size_t i = 0; i < world; ++i) made.at[i] = reinterpret_cast<void*>(addresses[i]);
    return made;
}

const void* source(std::uint64_t address) {
    return reinterpret_cast<const void*>(address);
}

RowsOfSums rows_of_sums(std::uint64_t from, std::uint64_t out, std::uint32_t rows,
                        std::uint32_t columns, bool half, std::uint32_t blocks, const RowNorm& norm,
                        bool twice, bool unrounded, const Prefetch& prefetch, bool tree) {
    return {.from = source(from),
            .out = reinterpret_cast<void*>(out),
            .rows = rows,
            .columns = columns,
            .half = half,
            .norm = norm,
            .blocks = blocks,
            .twice = twice,
            .unrounded = unrounded,
            .tree = tree,
            .prefetch = prefetch};
}

void bind_sum_rows(py::module_& module) {
    py::class_<RowsOfSums>(module, "RowsOfSums")
        .def(py::init(&rows_of_sums), py::kw_only(), "source"_a = 0, "out"_a = 0, "rows"_a,
             "columns"_a, "half"_a, "blocks"_a, "norm"_a = RowNorm{}, "twice"_a = false,
             "unrounded"_a = false, "prefetch"_a = Prefetch{}, "tree"_a = false);
    py::class_<SummedRows>(module, "SummedRows")
        .def(py::init<RowsOfSums, std::optional<float>>(), "rows"_a, "eps"_a = py::none());
    module.attr("MOST_NORMED_COLUMNS") = kMostNormedColumns;
    module.def("check_sum_rows", &check_sum_rows, "world"_a, "sums"_a);
    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def(
        "sum_rows",
        [](const DeviceWorld& world, const RowsOfSums& sums, std::uint64_t stream) {
            sum_rows(workspace_of(world), limits_of(world), sums, cuda::stream_at(stream));
        },
        "world"_a, "sums"_a, "stream"_a, released);
    module.def(
        "norm_rows",
        [](const RowsOfSums& sums, std::uint64_t stream) {
            norm_rows(sums, cuda::stream_at(stream));
        },
        "sums"_a, "stream"_a, released);
}

// The starter of AllReduce's calls. `by_mail`: one kernel sums and normalises the rows; otherwise a collective sums
// them, into the `outs` of all ranks if these are symmetric.
class SumStarter final : public CallStarter {
  public:
    SumStarter(int device, py::object order, Collective together, collectives::Element element,
               std::uint64_t elements, const Outs& outs, const Outputs& outputs, SummedRows sums,
               bool by_mail)
        : CallStarter(device, std::move(order)),
          together_(together),
          element_(element),
          elements_(elements),
          outs_(outs),
          outputs_(outputs),
          sums_(sums),
          by_mail_(by_mail) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        const cudaStream_t stream = cuda::stream_at(call.stream);
        const void* const x = source(call.addresses[kA]);
        Collective together = of_call(together_, call_number(call), call.timeout_s,
                                      outputs_.landings(call.addresses[kOut]), prefetch(call));
        if (by_mail_) {
            sum_rows(together.workspace, together.limits, sums_.of(call, x, together.prefetch),
                     stream);
            return;
        }
        Outs outs = outs_;
        if (!outs.symmetric) {
            outs.at[together.workspace.rank] = reinterpret_cast<void*>(call.addresses[kOut]);
        }
        collectives::all_reduce(together, element_, x, elements_, outs, collectives::Way::two_shot,
                                {}, stream);
        sums_.normalise(call, stream);
    }

    Collective together_;
    collectives::Element element_;
    std::uint64_t elements_;
    Outs outs_;
    Outputs outputs_;
    SummedRows sums_;
    bool by_mail_;
};

}  // namespace

void bind_collectives(py::module_& module) {
    using collectives::Element;
    using collectives::Way;
    bind_sum_rows(module);
    py::enum_<Element>(module, "Element")
        .value("bfloat16", Element::bfloat16)
        .value("float16", Element::float16)
        .value("float32_to_bfloat16", Element::float32_to_bfloat16)
        .value("float32_to_float16", Element::float32_to_float16);
    py::enum_<Way>(module, "Way").value("one_shot", Way::one_shot).value("two_shot", Way::two_shot);
    py::class_<Collective>(module, "Collective")
        .def(py::init(&collective), "world"_a, "staging_bytes"_a, "staging"_a = 0, "blocks"_a = 0,
             "by_mail"_a = false, "tree"_a = false)
        .def("of_call", &of_call, "number"_a, "timeout_s"_a, "landings"_a = Landings{},
             "prefetch"_a = Prefetch{});

    module.def("all_gather_staging", &collectives::all_gather_staging, "world"_a, "shard_bytes"_a,
               "symmetric"_a, "beside_bytes"_a = 0);
    module.def("reduce_scatter_staging", &collectives::reduce_scatter_staging, "world"_a,
               "element"_a, "part_elements"_a);
    module.def("all_reduce_staging", &collectives::all_reduce_staging, "world"_a, "element"_a,
               "elements"_a, "way"_a, "symmetric"_a);

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def(
        "all_gather",
        [](const Collective& call, std::uint64_t src, std::uint64_t shard_bytes,
           const std::vector<std::uint64_t>& out, std::uint64_t stream, std::uint64_t beside_src,
           std::uint64_t beside_bytes, std::uint64_t beside_out) {
            collectives::all_gather(
                call, source(src), shard_bytes, outs(call, out), cuda::stream_at(stream),
                {source(beside_src), beside_bytes, reinterpret_cast<void*>(beside_out)});
        },
        "call"_a, "src"_a, "shard_bytes"_a, "out"_a, "stream"_a, "beside_src"_a = 0,
        "beside_bytes"_a = 0, "beside_out"_a = 0, released);
    module.def(
        "reduce_scatter",
        [](const Collective& call, Element element, std::uint64_t src, std::uint64_t part_elements,
           std::uint64_t out, std::uint64_t stream, std::uint64_t bias, std::uint32_t columns) {
            collectives::reduce_scatter(call, element, source(src), part_elements,
                                        reinterpret_cast<void*>(out), {source(bias), columns},
                                        cuda::stream_at(stream));
        },
        "call"_a, "element"_a, "src"_a, "part_elements"_a, "out"_a, "stream"_a, "bias"_a = 0,
        "columns"_a = 0, released);
    module.def(
        "all_reduce",
        [](const Collective& call, Element element, std::uint64_t src, std::uint64_t elements,
           const std::vector<std::uint64_t>& out, Way way, std::uint64_t stream, std::uint64_t bias,
           std::uint32_t columns) {
            collectives::all_reduce(call, element, source(src), elements, outs(call, out), way,
                                    {source(bias), columns}, cuda::stream_at(stream));
        },
        "call"_a, "element"_a, "src"_a, "elements"_a, "out"_a, "way"_a, "stream"_a, "bias"_a = 0,
        "columns"_a = 0, released);
    module.def(
        "sum_starter",
        [](int device, py::object order, const Collective& together, Element element,
           std::uint64_t elements, const std::vector<std::uint64_t>& out, const Outputs& outputs,
           const SummedRows& sums, bool by_mail) {
            return CallStarter::capsule(std::make_unique<SumStarter>(
                device, std::move(order), together, element, elements,
                out.empty() ? Outs{} : outs(together, out), outputs, sums, by_mail));
        },
        "device"_a, "order"_a, "together"_a, "element"_a, "elements"_a, "outs"_a, "outputs"_a,
        "sums"_a, "by_mail"_a);
}

}  // namespace mkernel::cuda
