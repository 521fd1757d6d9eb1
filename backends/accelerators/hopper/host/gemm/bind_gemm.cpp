// The GEMM ops, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/accelerators/cuda/host/require.hpp"
#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/gemm/few_rows.hpp"
#include "backends/accelerators/hopper/host/gemm/fused.hpp"
#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows.cuh"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

void require_pitch(const std::string& name, std::int64_t pitch) {
    constexpr std::int64_t step = kAlignment / kElementBytes;
    require(pitch >= 0 && pitch % step == 0, name, pitch,
            "0 (packed rows) or a multiple of " + std::to_string(step) + " elements");
}

GemmTensors gemm_tensors(std::uint64_t a, std::uint64_t b, std::uint64_t out, std::uint64_t bias,
                         std::int64_t a_pitch, std::int64_t b_pitch, std::uint64_t a_scale,
                         std::uint64_t b_scale) {
    require_aligned("a", a);
    require_aligned("b", b);
    require_aligned("out", out);
    if (bias != 0) require_aligned("bias", bias);
    require_pitch("a_pitch", a_pitch);
    require_pitch("b_pitch", b_pitch);
    if (a_scale != 0) require_aligned("a_scale", a_scale);
    if (b_scale != 0) require_aligned("b_scale", b_scale);
    return {a, b, out, bias, a_pitch, b_pitch, a_scale, b_scale};
}

// Returns the product with these tensors.
Product with_tensors(Product product, const GemmTensors& tensors) {
    product.tensors = tensors;
    return product;
}

// Returns a product that has no tensors yet.
Product product_of(int n, int k, bool half, bool n_major, Tiling tiling, int band, int blocks,
                   Scaling scaling) {
    // Rows of out are packed, as those of a and b may be, and each must be as aligned as the first.
    require(n >= 1 && n % 8 == 0, "n", n, "a positive multiple of 8");
    const int step = static_cast<int>(kAlignment) / operand_bytes(scaling);
    require(k >= 1 && k % step == 0, "k", k, "a positive multiple of " + std::to_string(step));
    require(scaling == Scaling::none || !n_major, "n_major", n_major, "0 of e4m3 operands");
    require(tiling != Tiling::promoted || scaling != Scaling::none, "tiling",
            static_cast<int>(tiling), "another one than promoted, of 16-bit operands");
    require_positive("band", band);
    require(blocks >= 0, "blocks", blocks, "0 (one a multiprocessor) or more");
    return {{}, n, k, half, n_major, tiling, band, blocks, scaling};
}

AllGatherSchedule all_gather_schedule(int rows, int chunk_rows, int push_blocks, int slices,
                                      bool hierarchical, int segments, int levels) {
    require_positive("rows", rows);
    require_positive("chunk_rows", chunk_rows);
    require_positive("segments", segments);
    require(levels >= 0 && levels <= 2, "levels", levels, "0 to 2");
    require(push_blocks >= 0 && push_blocks % 2 == 0, "push_blocks", push_blocks,
            "an even number: whole clusters");
    const bool may_slice = push_blocks == 0 && chunk_rows >= rows;
    require(slices == 1 || (slices > 1 && may_slice), "slices", slices,
            "1, or more where copy engines move one chunk");
    return {rows, chunk_rows, push_blocks, slices, hierarchical, segments, levels};
}

ReduceSchedule reduce_schedule(int m, int rows, int panel_rows, int panel_columns, int pace,
                               bool by_outbox, bool everywhere,
                               const std::vector<std::uint64_t>& outs, bool alone,
                               int network_blocks, bool hierarchical) {
    require(network_blocks >= 0, "network_blocks", network_blocks, "0 or more");
    require_positive("m", m);
    require_positive("rows", rows);
    require_positive("panel_rows", panel_rows);
    require_positive("panel_columns", panel_columns);
    require(pace >= 0, "pace", pace, "0 or more clock cycles");
    for (const std::uint64_t out : outs) require_aligned("outs", out);
    return {.m = m,
            .rows = rows,
            .panel_rows = panel_rows,
            .panel_columns = panel_columns,
            .pace = pace,
            .by_outbox = by_outbox,
            .everywhere = everywhere,
            .outs = outs,
            .alone = alone,
            .network_blocks = network_blocks,
            .hierarchical = hierarchical};
}

FewRowsSchedule few_rows_schedule(int m, int splits, bool unrounded, FewRowsExchange exchange,
                                  bool tiled) {
    require(m >= 1 && (tiled || m <= kMostFewRows), "m", m,
            "1 to " + std::to_string(kMostFewRows) + ", or tiled");
    if (tiled && (splits > 1 || unrounded)) {
        throw std::invalid_argument("tiles by mail have whole sums, rounded");
    }
    require(splits >= 1 && splits <= kMostSplits, "splits", splits,
            "1 to " + std::to_string(kMostSplits));
    return {m, splits, unrounded, exchange, tiled};
}

void bind_data(py::module_& module) {
    py::enum_<Tiling>(module, "Tiling")
        .value("wide", Tiling::wide)
        .value("medium", Tiling::medium)
        .value("deep", Tiling::deep)
        .value("narrow", Tiling::narrow)
        .value("promoted", Tiling::promoted);
    py::class_<RowScales>(module, "RowScales")
        .def(py::init<std::uint64_t, std::uint64_t>(), "address"_a = 0, "bytes"_a = 0);
    py::enum_<Scaling>(module, "Scaling")
        .value("none", Scaling::none)
        .value("by_rows", Scaling::by_rows)
        .value("single", Scaling::single);
    py::class_<GemmTensors>(module, "GemmTensors")
        .def(py::init(&gemm_tensors), "a"_a, "b"_a, "out"_a, "bias"_a = 0, "a_pitch"_a = 0,
             "b_pitch"_a = 0, "a_scale"_a = 0, "b_scale"_a = 0)
        .def_readonly("a", &GemmTensors::a)
        .def_readonly("b", &GemmTensors::b)
        .def_readonly("out", &GemmTensors::out)
        .def_readonly("bias", &GemmTensors::bias)
        .def_readonly("a_pitch", &GemmTensors::a_pitch)
        .def_readonly("b_pitch", &GemmTensors::b_pitch)
        .def_readonly("a_scale", &GemmTensors::a_scale)
        .def_readonly("b_scale", &GemmTensors::b_scale);
    py::class_<Product>(module, "Product")
        .def(py::init(&product_of), py::kw_only(), "n"_a, "k"_a, "half"_a, "n_major"_a, "tiling"_a,
             "band"_a, "blocks"_a = 0, "scaling"_a = Scaling::none)
        .def("of", &with_tensors, "tensors"_a);
    py::class_<AllGatherSchedule>(module, "AllGatherSchedule")
        .def(py::init(&all_gather_schedule), "rows"_a, "chunk_rows"_a, "push_blocks"_a = 0,
             "slices"_a = 1, "hierarchical"_a = false, "segments"_a = 1, "levels"_a = 0)
        .def_readonly("push_blocks", &AllGatherSchedule::push_blocks);
    py::class_<ReduceSchedule>(module, "ReduceSchedule")
        .def(py::init(&reduce_schedule), py::kw_only(), "m"_a, "rows"_a, "panel_rows"_a,
             "panel_columns"_a, "pace"_a = 0, "by_outbox"_a = false, "everywhere"_a,
             "outs"_a = std::vector<std::uint64_t>{}, "alone"_a = false, "network_blocks"_a = 0,
             "hierarchical"_a = false)
        .def(
            "of_product",
            [](ReduceSchedule schedule, std::uint64_t given) {
                require_aligned("given", given);
                schedule.given = given;
                return schedule;
            },
            "given"_a);
}

void bind_pipelined(py::module_& module) {
    const auto released = py::call_guard<py::gil_scoped_release>();
    py::class_<PipelinedGather>(module, "PipelinedGather")
        .def(py::init<int, CallOrder&, DeviceWorld, Product, AllGatherSchedule>(), "device"_a,
             "order"_a, "world"_a, "product"_a, "schedule"_a, py::keep_alive<1, 3>())
        .def(
            "start",
            [](PipelinedGather& calls, std::uint32_t number, double timeout_s,
               const GemmTensors& tensors,
               std::uint64_t stream) { calls.start({number, timeout_s, tensors, stream}); },
            "number"_a, "timeout_s"_a, "tensors"_a, "stream"_a, released);
    py::class_<PipelinedReduce>(module, "PipelinedReduce")
        .def(py::init<int, DeviceWorld, Product, ReduceSchedule, Outputs>(), "device"_a, "world"_a,
             "product"_a, "schedule"_a, "outputs"_a)
        .def(
            "start",
            [](PipelinedReduce& calls, std::uint32_t number, double timeout_s,
               const GemmTensors& tensors, std::uint64_t stream,
               const std::vector<std::uint64_t>& outs) {
                for (const std::uint64_t each : outs) require_aligned("outs", each);
                calls.start({number, timeout_s, tensors, stream}, outs);
            },
            "number"_a, "timeout_s"_a, "tensors"_a, "stream"_a, "outs"_a, released);
}

void bind_few_rows(py::module_& module) {
    py::enum_<FewRowsExchange>(module, "FewRowsExchange")
        .value("gemm_all_reduce", FewRowsExchange::all_reduce)
        .value("gemm_reduce_scatter", FewRowsExchange::reduce_scatter);
    py::class_<FewRowsSchedule>(module, "FewRowsSchedule")
        .def(py::init(&few_rows_schedule), py::kw_only(), "m"_a, "splits"_a, "unrounded"_a,
             "exchange"_a = FewRowsExchange::all_reduce, "tiled"_a = false);
    py::class_<FewRowsCalls>(module, "FewRowsCalls")
        .def(py::init<int, DeviceWorld, Product, FewRowsSchedule>(), "device"_a, "world"_a,
             "product"_a, "schedule"_a)
        .def(
            "start",
            [](FewRowsCalls& calls, std::uint32_t number, double timeout_s,
               const GemmTensors& tensors, std::uint64_t stream, const Prefetch& prefetch) {
                calls.start({number, timeout_s, tensors, stream}, prefetch);
            },
            "number"_a, "timeout_s"_a, "tensors"_a, "stream"_a, "prefetch"_a = Prefetch{},
            py::call_guard<py::gil_scoped_release>());
    module.attr("MOST_SPLITS") = kMostSplits;
    module.attr("FEW_COLUMNS") = kFewColumns;
    module.attr("FEW_DEPTH_BYTES") = kFewDepthBytes;
    module.def("check_few_rows", &check_few_rows, "world"_a, "n"_a, "schedule"_a);
}

}  // namespace

void bind_gemm(py::module_& module) {
    bind_data(module);
    bind_pipelined(module);
    bind_few_rows(module);
    module.def("all_gather_gemm_bytes", &all_gather_gemm_bytes, "world"_a, "schedule"_a, "k"_a,
               "scaling"_a = Scaling::none);
    module.def("gemm_reduce_bytes", &gemm_reduce_bytes, "world"_a, "local"_a, "rows"_a, "n"_a,
               "tiling"_a, "by_outbox"_a, "gathers"_a);
    module.def("gemm_reduce_area_bytes", &gemm_reduce_area_bytes, "world"_a, "local"_a, "rows"_a,
               "n"_a, "tiling"_a, "gathers"_a, "hierarchical"_a);

    const auto released = py::call_guard<py::gil_scoped_release>();
    module.def("gathered_scales_at", &gathered_scales_at, "row_bytes"_a);
    module.def("push_rows", on_device(&push_rows), "device"_a, "world"_a, "rows"_a, "row_bytes"_a,
               "schedule"_a, "stream"_a, "scales"_a = RowScales{}, released);
    module.def("send_rows", on_device(&send_rows), "device"_a, "world"_a, "product"_a, "schedule"_a,
               "stream"_a, released);
    module.def("all_gather_gemm", on_device(&all_gather_gemm), "device"_a, "world"_a, "product"_a,
               "schedule"_a, "wait"_a, "stream"_a, released);
    module.def("gemm_reduce", on_device(&gemm_reduce), "device"_a, "world"_a, "product"_a,
               "schedule"_a, "stream"_a, released);
}

}  // namespace mkernel::hopper
