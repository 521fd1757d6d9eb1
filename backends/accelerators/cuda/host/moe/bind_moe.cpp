// The MoE ops, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/moe/far_slots.hpp"
#include "backends/accelerators/cuda/host/moe/ops.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {

void bind_moe(py::module_& module) {
    using moe::CrossingTokens;
    using moe::DispatchedRows;
    using moe::Home;
    using moe::QuantisedRows;
    using moe::ReportBlock;
    using moe::Routing;
    using moe::Sizes;
    using moe::Step;
    using moe::WantedTokens;
    using Word = std::int32_t;
    using Address = std::uint64_t;

    py::class_<FarSlots>(module, "FarSlots")
        .def(py::init([](Address offset, Address bytes, std::uint32_t flag) {
                 return FarSlots{offset, bytes, flag, bytes};
             }),
             py::kw_only(), "offset"_a, "bytes"_a, "flag"_a)
        .def_readonly("offset", &FarSlots::offset)
        .def_readonly("bytes", &FarSlots::bytes)
        .def("bytes_of", &FarSlots::bytes_of, "piece"_a)
        .def_readonly("relayed", &FarSlots::relayed)
        .def_readonly("flag", &FarSlots::flag);
    py::class_<Sizes>(module, "MoeSizes")
        .def(py::init([](Word world, Word tokens, Word top_k, Word experts) {
                 return Sizes{world, tokens, top_k, experts};
             }),
             py::kw_only(), "world"_a, "tokens"_a, "top_k"_a, "experts"_a)
        .def("table_words", &moe::table_words)
        .def("dispatch_bytes", &moe::dispatch_bytes, "row_bytes"_a, "pieces"_a)
        .def("home_bytes", &moe::home_bytes, "row_bytes"_a, "by_rank"_a)
        .def("far_weights", &moe::far_weights, "hierarchical"_a)
        .def("far_sums", &moe::far_sums, "row_bytes"_a, "pieces"_a, "hierarchical"_a)
        .def("outbox_offset", &moe::outbox_offset, "row_bytes"_a);
    py::class_<ReportBlock>(module, "ReportBlock")
        .def(py::init<>())
        .def("rows", &ReportBlock::rows, "call"_a)
        .def("take_refusal", &ReportBlock::take_refusal);
    py::class_<Routing>(module, "Routing")
        .def(py::init([](const Sizes& sizes, Address routing, Address ids, Address counts,
                         Address row_bytes, Word capacity, Word early, Word early_rows, Word pieces,
                         bool exchanges) {
                 return Routing{sizes,    routing, ids,        counts, row_bytes,
                                capacity, early,   early_rows, pieces, exchanges};
             }),
             py::kw_only(), "sizes"_a, "routing"_a, "ids"_a, "counts"_a, "row_bytes"_a,
             "capacity"_a, "early"_a, "early_rows"_a, "pieces"_a, "exchanges"_a);
    py::class_<WantedTokens>(module, "WantedTokens")
        .def(py::init([](const Sizes& sizes, Address x, Address ids, Address row_bytes,
                         Word blocks) { return WantedTokens{sizes, x, ids, row_bytes, blocks}; }),
             py::kw_only(), "sizes"_a, "x"_a, "ids"_a, "row_bytes"_a, "blocks"_a);
    py::class_<CrossingTokens>(module, "CrossingTokens")
        .def(py::init([](const Sizes& sizes, Address x, Address ids, Address row_bytes, Word pieces,
                         bool hierarchical) {
                 return CrossingTokens{sizes, x, ids, row_bytes, pieces, hierarchical};
             }),
             py::kw_only(), "sizes"_a, "x"_a, "ids"_a, "row_bytes"_a, "pieces"_a, "hierarchical"_a);
    py::class_<DispatchedRows>(module, "DispatchedRows")
        .def(py::init([](const Sizes& sizes, Address routing, Address a, Address out,
                         Address scales, Address row_bytes, Word width, Word height, Word pieces,
                         bool waits, Word blocks) {
                 return DispatchedRows{sizes, routing, a,      out,   scales, row_bytes,
                                       width, height,  pieces, waits, blocks};
             }),
             py::kw_only(), "sizes"_a, "routing"_a, "a"_a, "out"_a, "scales"_a, "row_bytes"_a,
             "width"_a, "height"_a, "pieces"_a, "waits"_a, "blocks"_a);
    py::class_<QuantisedRows>(module, "QuantisedRows")
        .def(py::init([](Address x, Address scales, Address out, Word rows, Word width,
                         Word row_bytes, bool half) {
                 return QuantisedRows{x, scales, out, rows, width, row_bytes, half};
             }),
             py::kw_only(), "x"_a, "scales"_a, "out"_a, "rows"_a, "width"_a, "row_bytes"_a,
             "half"_a);
    py::class_<Home>(module, "Home")
        .def(py::init([](const Sizes& sizes, Address routing, Address y, Address weights,
                         Address out, Word width, Word first, Word end, Word pieces, Word groups,
                         bool half, bool wide, bool by_rank, bool waits, bool hierarchical,
                         Word blocks) {
                 return Home{sizes,  routing, y,    weights, out,     width, first,        end,
                             pieces, groups,  half, wide,    by_rank, waits, hierarchical, blocks};
             }),
             py::kw_only(), "sizes"_a, "routing"_a, "y"_a, "weights"_a, "out"_a, "width"_a,
             "first"_a, "end"_a, "pieces"_a, "groups"_a, "half"_a, "wide"_a, "by_rank"_a, "waits"_a,
             "hierarchical"_a, "blocks"_a);
    py::enum_<Step>(module, "HomeStep")
        .value("send_rows", Step::send_rows)
        .value("sum_slots", Step::sum_slots)
        .value("sum_rows", Step::sum_rows)
        .value("relay_sums", Step::relay_sums)
        .value("sum_ranks", Step::sum_ranks);

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("load_moe", on_device(&moe::load), "device"_a, released);
    module.def(
        "moe_route",
        on_device<const DeviceWorld&, const Routing&, const ReportBlock&, Address>(&moe::route),
        "device"_a, "world"_a, "routing"_a, "report"_a, "stream"_a, released);
    module.def("push_whole", on_device(&moe::push_whole), "device"_a, "world"_a, "rows"_a,
               "nbytes"_a, "stream"_a, released);
    module.def("push_wanted",
               on_device<const DeviceWorld&, const WantedTokens&, Address>(&moe::push_wanted),
               "device"_a, "world"_a, "tokens"_a, "stream"_a, released);
    module.def("put_tokens",
               on_device<const DeviceWorld&, const CrossingTokens&, Address>(&moe::put_tokens),
               "device"_a, "world"_a, "tokens"_a, "stream"_a, released);
    module.def(
        "land_tokens",
        on_device<const DeviceWorld&, const CrossingTokens&, Word, Address>(&moe::land_tokens),
        "device"_a, "world"_a, "tokens"_a, "blocks"_a, "stream"_a, released);
    module.def("copy_rows",
               on_device<const DeviceWorld&, const DispatchedRows&, Address>(&moe::copy_rows),
               "device"_a, "world"_a, "rows"_a, "stream"_a, released);
    module.def("quantise_rows", on_device<const QuantisedRows&, Address>(&moe::quantise_rows),
               "device"_a, "rows"_a, "stream"_a, released);
    module.def("moe_home", on_device(&moe::bring_home), "device"_a, "world"_a, "home"_a, "step"_a,
               "stream"_a, released);
    module.def("fill_outbox", on_device(&fill_outbox), "device"_a, "world"_a, "from_"_a, "nbytes"_a,
               "outbox"_a, "stream"_a, released);
    module.def("send_far", on_device(&send_far), "device"_a, "world"_a, "from_"_a, "slots"_a,
               "stream"_a, released);
    module.def("send_outbox", on_device(&send_outbox), "device"_a, "world"_a, "outbox"_a, "slots"_a,
               "stream"_a, "piece"_a = 0, released);
    module.def("land_far",
               on_device<const DeviceWorld&, const std::vector<FarSlots>&, Address>(&land_far),
               "device"_a, "world"_a, "slots"_a, "stream"_a, released);
    module.def("shares_device", &shares_device, "device"_a, "world"_a);
}

}  // namespace mkernel::cuda
