// Ring attention around a library's calls, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/attention/given_rows.hpp"
#include "backends/accelerators/cuda/host/attention/transfers.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/kernels/attention/crossing.hpp"
#include "backends/accelerators/cuda/kernels/attention/parts.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

using attention::check_count;
using attention::Given;
using attention::Keys;
using attention::KeysCrossing;
using attention::Merge;
using attention::Part;
using attention::Piece;
using attention::Rows;
using attention::rows;
using attention::Running;
using attention::Sum;
using attention::Sums;

Part part(std::uint64_t out, const std::array<std::int64_t, 3>& strides, std::uint64_t lse,
          std::int32_t first) {
    return {rows(out, strides), reinterpret_cast<const float*>(lse), first};
}

Running running(std::uint64_t out, std::uint64_t lse, bool read, bool write) {
    rows(out, {});
    return {reinterpret_cast<float*>(out), reinterpret_cast<float*>(lse), read, write};
}

Merge merge(const std::vector<Part>& parts, std::uint64_t out,
            const std::array<std::int64_t, 3>& strides, std::uint64_t lse, std::int64_t lse_pitch,
            const std::array<std::int32_t, 4>& shape, bool half, const Running& before) {
    check_count(parts.size());
    Merge made{};
    for (const Part& each : parts) made.parts[made.count++] = each;
    made.out = rows(out, strides);
    made.lse = reinterpret_cast<float*>(lse);
    made.batch = shape[0];
    made.heads = shape[1];
    made.rows = shape[2];
    made.width = shape[3];
    made.lse_pitch = lse_pitch;
    made.half = half;
    made.running = before;
    return made;
}

// `shape`: batch, heads of keys, rows, width.
KeysCrossing keys_crossing(
    const std::array<std::pair<std::uint64_t, std::array<std::int64_t, 3>>, 2>& tensors,
    const std::array<std::int32_t, 4>& shape, std::int32_t chunk_rows, std::int32_t put_blocks,
    bool causal, bool hierarchical) {
    KeysCrossing made{};
    made.chunks = {shape[0] * shape[1], shape[2], chunk_rows};
    made.k = rows(tensors[0].first, tensors[0].second);
    made.v = rows(tensors[1].first, tensors[1].second);
    made.kv_heads = shape[1];
    made.row_bytes = 2 * shape[3];
    made.put_blocks = put_blocks;
    made.causal = causal;
    made.hierarchical = hierarchical;
    return made;
}

Given given(std::uint64_t of, const std::array<std::int64_t, 3>& strides, std::int32_t first,
            std::int32_t count) {
    return {rows(of, strides), first, count};
}

Sum sum(const std::vector<Given>& parts, std::uint64_t out,
        const std::array<std::int64_t, 3>& strides, const std::array<std::int32_t, 2>& shape,
        float factor) {
    check_count(parts.size());
    Sum made{};
    for (const Given& each : parts) made.given[made.count++] = each;
    made.out = rows(out, strides);
    made.heads = shape[0];
    made.rows = shape[1];
    made.factor = factor;
    return made;
}

Sums sums(const std::array<Sum, attention::kSums>& of, std::int32_t batch, std::int32_t width,
          bool half) {
    return {{of[0], of[1], of[2]}, batch, width, half};
}

}  // namespace

void bind_attention(py::module_& module) {
    py::class_<Keys>(module, "Keys")
        .def(py::init([](std::uint64_t bytes, std::uint64_t width, std::uint64_t pitch,
                         std::uint64_t count) { return Keys{bytes, width, pitch, count}; }),
             py::kw_only(), "bytes"_a, "width"_a, "pitch"_a, "count"_a)
        .def_readonly("bytes", &Keys::bytes)
        .def_readonly("pitch", &Keys::pitch)
        .def_readonly("count", &Keys::count)
        .def("slot_offset", &attention::slot_offset, "world"_a, "local"_a, "rank"_a, "source"_a)
        .def("gradient_offset", &attention::gradient_offset, "world"_a, "rank"_a, "from_rank"_a)
        .def("area_bytes", &attention::area_bytes, "world"_a)
        .def("workspace_bytes", &attention::workspace_bytes, "world"_a, "gradients"_a = false);
    py::class_<Piece>(module, "Piece")
        .def(py::init([](std::uint64_t at, std::uint64_t width, std::uint64_t pitch,
                         std::uint64_t count) { return Piece{at, width, pitch, count}; }),
             py::kw_only(), "at"_a, "width"_a, "pitch"_a, "count"_a);
    py::class_<Part>(module, "Part").def(py::init(&part), "out"_a, "strides"_a, "lse"_a, "first"_a);
    py::class_<Running>(module, "Running")
        .def(py::init(&running), "out"_a, "lse"_a, "read"_a, "write"_a);
    py::class_<Merge>(module, "Merge")
        .def(py::init(&merge), "parts"_a, "out"_a, "strides"_a, "lse"_a, "lse_pitch"_a, "shape"_a,
             "half"_a, "running"_a = Running{});
    py::class_<Given>(module, "Given")
        .def(py::init(&given), "of"_a, "strides"_a, "first"_a, "rows"_a);
    py::class_<Sum>(module, "Sum")
        .def(py::init(&sum), "given"_a, "out"_a, "strides"_a, "shape"_a, "factor"_a);
    py::class_<Sums>(module, "Sums").def(py::init(&sums), "sums"_a, "batch"_a, "width"_a, "half"_a);
    module.attr("GRADIENT_FLAGS") = attention::kGradientFlags;
    module.attr("MOST_RANKS") = kMaxRanks;

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("push_keys", on_device(&attention::push_keys), "device"_a, "world"_a, "k"_a, "v"_a,
               "keys"_a, "zigzag"_a, "chunk"_a, "stream"_a, released);
    module.def("load_attention", on_device(&attention::load), "device"_a, released);
    py::class_<KeysCrossing>(module, "KeysCrossing")
        .def(py::init(&keys_crossing), "tensors"_a, "shape"_a, "chunk_rows"_a, "put_blocks"_a,
             "causal"_a, "hierarchical"_a)
        .def_property_readonly("chunks",
                               [](const KeysCrossing& made) { return made.chunks.count(); });
    module.def(
        "cross_keys",
        [](int device, const DeviceWorld& world, KeysCrossing crossing, std::uint32_t land_blocks,
           std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            crossing.workspace = workspace_of(world);
            crossing.limits = limits_of(world);
            attention::cross_keys(crossing, land_blocks, cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "crossing"_a, "land_blocks"_a, "stream"_a, released);
    module.def(
        "await_crossing",
        [](int device, const DeviceWorld& world, std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            attention::await_crossing(workspace_of(world), limits_of(world),
                                      cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "stream"_a, released);
    module.def("push_piece", on_device(&attention::push_piece), "device"_a, "world"_a, "peer"_a,
               "k"_a, "v"_a, "piece"_a, "place"_a, "flag"_a, "stream"_a, released);
    module.def("tell", on_device(&attention::tell), "device"_a, "world"_a, "peer"_a, "flag"_a,
               "stream"_a, released);
    module.def(
        "await_part",
        [](int device, const DeviceWorld& world, int source, std::uint32_t flag,
           std::uint64_t stream, std::uint32_t count, std::uint32_t width, std::uint32_t stride) {
            const cuda::DeviceScope scope(device);
            attention::await_part(workspace_of(world), limits_of(world), source, flag,
                                  cuda::stream_at(stream), {count, 0, 0, width, stride});
        },
        "device"_a, "world"_a, "source"_a, "flag"_a, "stream"_a, "count"_a = 1, "width"_a = 1,
        "stride"_a = 1, released);
    module.def("push_gradients", on_device(&attention::push_gradients), "device"_a, "world"_a,
               "owner"_a, "of_k"_a, "of_v"_a, "bytes"_a, "keys"_a, "place"_a, "flag"_a, "stream"_a,
               released);
    module.def(
        "merge_parts",
        [](int device, const DeviceWorld& world, const Merge& merge, std::uint32_t blocks,
           bool ends, std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            attention::merge(workspace_of(world), limits_of(world), merge, blocks, ends,
                             cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "merge"_a, "blocks"_a, "ends"_a, "stream"_a, released);
    module.def(
        "sum_gradients",
        [](int device, const DeviceWorld& world, const Sums& sums, std::uint32_t blocks, bool ends,
           std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            attention::sum(workspace_of(world), limits_of(world), sums, blocks, ends,
                           cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "sums"_a, "blocks"_a, "ends"_a, "stream"_a, released);
}

}  // namespace mkernel::cuda
