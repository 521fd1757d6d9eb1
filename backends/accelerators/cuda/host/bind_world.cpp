// A call's world, and what ends it, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/device_network.hpp"
#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/cuda/host/require.hpp"
#include "backends/accelerators/cuda/kernels/collectives/row_norm.hpp"
#include "backends/accelerators/cuda/kernels/rendezvous.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

DeviceWorld world_of(const std::vector<std::uint64_t>& workspaces, int rank, std::uint64_t control,
                     double timeout_s, std::uint32_t call, const std::optional<Network>& network) {
    const auto ranks = static_cast<int>(workspaces.size());
    require(ranks >= 1 && ranks <= kMaxRanks, "ranks", ranks, "1 to " + std::to_string(kMaxRanks));
    require(rank >= 0 && rank < ranks, "rank", rank, "0 to " + std::to_string(ranks - 1));
    for (int other = 0; other < ranks; ++other) {
        const bool far = network && other != rank && workspaces[other] == 0;
        if (!far) require_aligned("workspace", workspaces[other]);
    }
    return {workspaces, network.value_or(Network{}), rank, control, timeout_s, call};
}

RowNorm row_norm(std::uint64_t weight, std::uint64_t residual, std::uint64_t residual_out,
                 float eps, std::uint64_t quantised, std::uint64_t quantised_scale) {
    require_aligned("weight", weight);
    require_aligned("residual_out", residual_out);
    if (residual != 0) require_aligned("residual", residual);
    return {.weight = reinterpret_cast<const void*>(weight),
            .residual = reinterpret_cast<const void*>(residual),
            .residual_out = reinterpret_cast<void*>(residual_out),
            .eps = eps,
            .quantised = reinterpret_cast<void*>(quantised),
            .scales = reinterpret_cast<float*>(quantised_scale)};
}

void bind_network(py::module_& module) {
    py::class_<Network>(module, "Network");
    py::class_<DeviceNetwork>(module, "DeviceNetwork")
        .def(py::init<int, std::uint64_t, std::uint64_t, bool>(), "device"_a, "fifo"_a, "pad"_a,
             "ordered"_a, py::call_guard<py::gil_scoped_release>())
        .def("of", &DeviceNetwork::of, "area"_a, "staged"_a, "region"_a, "offset"_a);
}

}  // namespace

void bind_world(py::module_& module) {
    bind_network(module);
    py::class_<DeviceWorld>(module, "DeviceWorld")
        .def(py::init(&world_of), "workspaces"_a, "rank"_a, "control"_a, "timeout_s"_a, "call"_a,
             "network"_a = py::none())
        .def(
            "of_call",
            [](DeviceWorld world, std::uint32_t number, double timeout_s) {
                world.call = number;
                world.timeout_s = timeout_s;
                return world;
            },
            "number"_a, "timeout_s"_a);
    module.attr("NETWORK_WORDS") = kNetworkWords;
    py::class_<RowNorm>(module, "RowNorm")
        .def(py::init(&row_norm), py::kw_only(), "weight"_a, "residual"_a = 0, "residual_out"_a,
             "eps"_a, "quantised"_a = 0, "quantised_scale"_a = 0);
    module.attr("MAX_FLAGS") = kFlags;
    module.attr("MAX_COPIED_CHUNKS") = kEpochCopies;
    module.attr("DATA_OFFSET") = kDataOffset;
    module.def("epoch_offsets", &epoch_offsets);
    module.attr("MAIL_BYTES") = kMailBytes;
    const auto released = py::call_guard<py::gil_scoped_release>();
    using Copy = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // to, from, bytes
    module.def(
        "rendezvous",
        [](int device, const DeviceWorld& world, const std::vector<Copy>& copies,
           std::uint64_t stream) {
            const DeviceScope scope(device);
            LastCopies last;
            for (const auto& [to, from, nbytes] : copies) last.add(to, from, nbytes);
            rendezvous(workspace_of(world), limits_of(world), last, stream_at(stream));
        },
        "device"_a, "world"_a, "copies"_a, "stream"_a, released);
}

}  // namespace mkernel::cuda
