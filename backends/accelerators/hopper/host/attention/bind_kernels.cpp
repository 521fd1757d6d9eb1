// Attention by kernels of ours, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/attention/given_rows.hpp"
#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.hpp"
#include "backends/accelerators/hopper/kernels/attention/ring_attention.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

using attention::check_count;
using attention::Core;
using attention::Ring;
using attention::RingPart;
using attention::rows;

using RowsAt = std::pair<std::uint64_t, std::array<std::int64_t, 3>>;  // address, strides

// `shape`: batch, heads, heads of keys, queries, keys, width.
Core core(const std::array<RowsAt, 4>& tensors, std::uint64_t lse, std::uint64_t counters,
          const std::array<std::int32_t, 6>& shape, float scale, bool causal, bool half) {
    const auto of = [&](int which) { return rows(tensors[which].first, tensors[which].second); };
    Core made{};
    made.q = of(0);
    made.k = of(1);
    made.v = of(2);
    made.out = of(3);
    made.lse = reinterpret_cast<float*>(lse);
    made.counters = reinterpret_cast<std::uint32_t*>(counters);
    made.batch = shape[0];
    made.heads = shape[1];
    made.kv_heads = shape[2];
    made.queries = shape[3];
    made.keys = shape[4];
    made.width = shape[5];
    made.scale = scale;
    made.causal = causal;
    made.half = half;
    return made;
}

Ring ring(const Core& core, const std::vector<RingPart>& parts, const RowsAt& slots,
          std::int64_t values, std::int32_t chunk_rows, std::int32_t blocks, bool exchanges,
          bool by_head, bool ordered) {
    Ring made{};
    if (parts.size() > made.parts.size()) check_count(parts.size() + 1);
    made.core = core;
    for (const RingPart& each : parts) made.parts[made.count++] = each;
    made.slots = rows(slots.first, slots.second);
    made.values = values;
    made.chunk_rows = chunk_rows;
    made.blocks = blocks;
    made.exchanges = exchanges;
    made.by_head = by_head;
    made.ordered = ordered;
    return made;
}

}  // namespace

void bind_attention(py::module_& module) {
    py::class_<Core>(module, "Core")
        .def(py::init(&core), "tensors"_a, "lse"_a, "counters"_a, "shape"_a, "scale"_a, "causal"_a,
             "half"_a);
    py::class_<RingPart>(module, "RingPart")
        .def(py::init([](std::int32_t source, std::int32_t first, std::int32_t keys) {
                 return RingPart{source, first, keys};
             }),
             "source"_a, "first"_a, "keys"_a);
    py::class_<Ring>(module, "Ring")
        .def(py::init(&ring), "core"_a, "parts"_a, "slots"_a, "values"_a, "chunk_rows"_a,
             "blocks"_a, "exchanges"_a, "by_head"_a = false, "ordered"_a = false);
    module.attr("COUNTERS_OFFSET") = offsetof(Control, counters);
    module.attr("COUNTERS_BYTES") = sizeof(Control::counters[0]);

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def(
        "attend",
        [](int device, const Core& core, std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            attention::attend(core, cuda::stream_at(stream));
        },
        "device"_a, "core"_a, "stream"_a, released);
    module.def(
        "attend_ring",
        [](int device, const DeviceWorld& world, const Ring& ring, std::uint64_t stream) {
            const cuda::DeviceScope scope(device);
            attention::attend_ring(world, ring, cuda::stream_at(stream));
        },
        "device"_a, "world"_a, "ring"_a, "stream"_a, released);
}

}  // namespace mkernel::hopper
