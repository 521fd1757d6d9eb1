// Python bindings of the ascend backend. Everything that blocks releases the GIL; no native thread
// ever calls Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/ag_gemm.hpp"
#include "backends/accelerators/ascend/host/gemm_reduce.hpp"
#include "backends/accelerators/ascend/host/launch.hpp"
#include "backends/accelerators/ascend/sim/matrix_unit.hpp"
#include "backends/accelerators/ascend/sim/replay.hpp"
#include "backends/accelerators/ascend/sim/scheduler.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

isa::DType dtype_named(const std::string& name) {
    for (const auto dtype : {isa::DType::float16, isa::DType::bfloat16, isa::DType::float32}) {
        if (name == isa::name_of(dtype)) return dtype;
    }
    throw py::value_error("dtype = " + name + "; expected float16, bfloat16 or float32");
}

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(address);
}

std::uint64_t nanoseconds(double seconds) {
    return static_cast<std::uint64_t>(std::llround(std::min(std::max(seconds, 0.0), 1e9) * 1e9));
}

ag_gemm::Geometry ag_geometry(std::uint32_t world, std::uint32_t m_local, std::uint32_t n,
                              std::uint32_t k, const std::string& dtype, std::uint32_t tile_m,
                              std::uint32_t tile_n, std::uint32_t tile_k, std::uint32_t step_k,
                              std::uint32_t tiles_per_chunk) {
    const ag_gemm::Geometry made{.world = world,
                                 .m_local = m_local,
                                 .n = n,
                                 .k = k,
                                 .tile_m = tile_m,
                                 .tile_n = tile_n,
                                 .tile_k = tile_k,
                                 .step_k = step_k,
                                 .tiles_per_chunk = tiles_per_chunk,
                                 .dtype = dtype_named(dtype)};
    host::check(made);
    return made;
}

gemm_reduce::Geometry reduce_geometry(std::uint32_t world, std::uint32_t m, std::uint32_t n,
                                      std::uint32_t k, const std::string& dtype,
                                      const std::string& out_dtype, bool replicated,
                                      std::uint32_t tile_m, std::uint32_t tile_n,
                                      std::uint32_t tile_k, std::uint32_t step_k,
                                      std::uint32_t tiles_per_chunk) {
    const gemm_reduce::Geometry made{.world = world,
                                     .m = m,
                                     .n = n,
                                     .k = k,
                                     .tile_m = tile_m,
                                     .tile_n = tile_n,
                                     .tile_k = tile_k,
                                     .step_k = step_k,
                                     .tiles_per_chunk = tiles_per_chunk,
                                     .replicated = replicated,
                                     .dtype = dtype_named(dtype),
                                     .out_dtype = dtype_named(out_dtype)};
    host::check(made);
    return made;
}

using Matrix = std::tuple<std::uint64_t, std::int64_t, std::int64_t>;  // address, strides

isa::GlobalView view(const Matrix& matrix, isa::DType dtype, std::uint32_t rows,
                     std::uint32_t cols) {
    return {pointer<std::byte>(std::get<0>(matrix)),
            dtype,
            rows,
            cols,
            std::get<1>(matrix),
            std::get<2>(matrix)};
}

// Tensors of a call; for a record, whose tensors are never touched, the same with null addresses.
std::unique_ptr<host::Kernels> ag_kernels(const ag_gemm::Geometry& g, const Matrix& a,
                                          const Matrix& b, const Matrix& out,
                                          const std::string& out_dtype,
                                          std::vector<std::uint32_t> order) {
    ag_gemm::Args args;
    args.geometry = g;
    args.a = view(a, g.dtype, g.m_local, g.k);
    args.b = view(b, g.dtype, g.k, g.n);
    args.out = view(out, dtype_named(out_dtype), g.m_local * g.world, g.n);
    return std::make_unique<host::AgGemm>(args, std::move(order));
}

std::unique_ptr<host::Kernels> reduce_kernels(const gemm_reduce::Geometry& g, const Matrix& a,
                                              const Matrix& b, const Matrix& out,
                                              const std::string& out_dtype,
                                              std::vector<std::uint32_t> order) {
    gemm_reduce::Args args;
    args.geometry = g;
    args.a = view(a, g.dtype, g.m, g.k);
    args.b = view(b, g.dtype, g.k, g.n);
    args.out = view(out, dtype_named(out_dtype), g.grid_rows(), g.n);
    return std::make_unique<host::GemmReduce>(args, std::move(order));
}

std::unique_ptr<host::Kernels> kernels(const py::object& geometry, const Matrix& a, const Matrix& b,
                                       const Matrix& out, const std::string& out_dtype,
                                       std::vector<std::uint32_t> order) {
    if (py::isinstance<ag_gemm::Geometry>(geometry)) {
        return ag_kernels(geometry.cast<const ag_gemm::Geometry&>(), a, b, out, out_dtype,
                          std::move(order));
    }
    return reduce_kernels(geometry.cast<const gemm_reduce::Geometry&>(), a, b, out, out_dtype,
                          std::move(order));
}

std::shared_ptr<host::Launch> launch(
    const py::object& geometry, std::uint32_t rank, const Matrix& a, const Matrix& b,
    const Matrix& out, const std::string& out_dtype, std::uint64_t epoch, std::uint32_t number,
    std::uint64_t pad, std::uint64_t workspace, std::uint32_t signal_base, std::uint32_t region,
    const std::vector<std::pair<std::uint64_t, std::uint64_t>>& peers,
    std::vector<std::uint32_t> order, std::uint32_t compute_blocks, std::uint32_t comm_blocks,
    std::uint32_t node, std::uint64_t fifo, double timeout_s, const std::string& view_name,
    bool trace, std::optional<sim::StrictOptions> strict) {
    host::Call call;
    call.strict = std::move(strict);
    const std::size_t ordered = order.size();
    call.kernels = kernels(geometry, a, b, out, out_dtype, std::move(order));
    call.args.rank = rank;
    call.args.epoch = epoch;
    call.args.pad = pointer<std::byte>(pad);
    call.args.workspace = pointer<std::byte>(workspace);
    call.args.signal_base = signal_base;
    call.args.region = region;
    for (const auto& [peer_pad, peer_workspace] : peers) {
        call.peers.push_back({pointer<std::byte>(peer_pad), pointer<std::byte>(peer_workspace)});
    }
    call.compute_blocks = compute_blocks;
    call.comm_blocks = comm_blocks;
    call.number = number;
    call.node = node;
    call.fifo = pointer<const nics::FifoDevice>(fifo);
    call.timeout_ns = nanoseconds(timeout_s);
    call.trace = trace;
    call.view = view_name == "sequential"     ? host::View::sequential
                : view_name == "compute_only" ? host::View::compute_only
                                              : host::View::pipelined;
    const std::uint32_t world = call.kernels->world();
    if (call.peers.size() != world || ordered != world || rank >= world) {
        throw py::value_error("peers and order must have one entry a rank of the world");
    }
    if (compute_blocks == 0 || comm_blocks == 0 || epoch == 0) {
        throw py::value_error("compute_blocks, comm_blocks and epoch must be at least 1");
    }
    const runtime::SignalPad signals(call.args.pad);
    if (!signals.valid()) throw py::value_error("pad does not hold a formatted signal pad");
    const std::uint64_t end = signal_base + std::uint64_t{call.kernels->signals()};
    if (end > signals.capacity()) {
        throw py::value_error("the plan needs signals up to " + std::to_string(end) +
                              ", the signal pad has " + std::to_string(signals.capacity()) +
                              "; raise the setting `signals`");
    }
    const py::gil_scoped_release release;
    return host::Launch::start(std::move(call));
}

py::bytes record(const py::object& geometry, std::uint32_t rank, const std::vector<bool>& same_node,
                 std::vector<std::uint32_t> order, const Matrix& a, const Matrix& b,
                 const Matrix& out, const std::string& out_dtype, std::uint32_t compute_blocks,
                 std::uint32_t comm_blocks, std::uint32_t node) {
    host::Call call;
    const std::size_t ordered = order.size();
    call.kernels = kernels(geometry, a, b, out, out_dtype, std::move(order));
    const std::uint32_t world = call.kernels->world();
    if (same_node.size() != world || ordered != world || rank >= world) {
        throw py::value_error("same_node and order must have one entry a rank of the world");
    }
    call.args.rank = rank;
    for (const bool near : same_node) {
        call.peers.push_back({near ? pointer<std::byte>(1) : nullptr, nullptr});
    }
    call.compute_blocks = compute_blocks;
    call.comm_blocks = comm_blocks;
    call.node = node;
    std::string blob;
    {
        const py::gil_scoped_release release;
        blob = host::record(std::move(call));
    }
    return py::bytes(blob);
}

// (total, [(rank, kernel, start, end)], spans as bytes); times in ns.
using ReplayResult =
    std::tuple<double, std::vector<std::tuple<std::uint32_t, std::string, double, double>>,
               std::string>;

ReplayResult replay(const std::vector<std::string>& traces, const sim::Machine& machine,
                    const std::string& view_name, bool keep_spans) {
    const auto view = view_name == "sequential"     ? sim::ReplayView::sequential
                      : view_name == "compute_only" ? sim::ReplayView::compute_only
                                                    : sim::ReplayView::pipelined;
    const sim::Replay run = sim::replay(traces, machine, view, keep_spans);
    ReplayResult result{run.total_ns, {}, {}};
    for (const auto& kernel : run.kernels) {
        std::get<1>(result).emplace_back(kernel.rank,
                                         kernel.kind == sim::CoreKind::aiv ? "comm" : "compute",
                                         kernel.start_ns, kernel.end_ns);
    }
    std::get<2>(result).assign(reinterpret_cast<const char*>(run.spans.data()),
                               run.spans.size() * sizeof(sim::Span));
    return result;
}

}  // namespace

PYBIND11_MODULE(_ascend, module) {
    module.doc() = "Simulator and kernels of the ascend backend.";

    py::class_<ag_gemm::Geometry>(module, "AgGemmGeometry")
        .def(py::init(&ag_geometry), py::kw_only(), "world"_a, "m_local"_a, "n"_a, "k"_a, "dtype"_a,
             "tile_m"_a, "tile_n"_a, "tile_k"_a, "step_k"_a, "tiles_per_chunk"_a)
        .def_property_readonly("chunks", &ag_gemm::Geometry::chunks)
        .def_property_readonly("workspace_bytes", &ag_gemm::Geometry::workspace_bytes)
        .def_property_readonly("signals", &ag_gemm::Geometry::signals)
        .def("flag", &ag_gemm::Geometry::flag, "parity"_a, "source"_a, "chunk"_a)
        .def("summary", &ag_gemm::Geometry::summary, "parity"_a, "source"_a)
        .def("released", &ag_gemm::Geometry::released, "rank"_a)
        .def("slot_offset", &ag_gemm::Geometry::slot_offset, "parity"_a, "source"_a);

    py::class_<gemm_reduce::Geometry>(module, "GemmReduceGeometry")
        .def(py::init(&reduce_geometry), py::kw_only(), "world"_a, "m"_a, "n"_a, "k"_a, "dtype"_a,
             "out_dtype"_a, "replicated"_a, "tile_m"_a, "tile_n"_a, "tile_k"_a, "step_k"_a,
             "tiles_per_chunk"_a)
        .def_property_readonly("chunks", &gemm_reduce::Geometry::chunks)
        .def_property_readonly("workspace_bytes", &gemm_reduce::Geometry::workspace_bytes)
        .def_property_readonly("signals", &gemm_reduce::Geometry::signals)
        .def("arrived", &gemm_reduce::Geometry::arrived, "parity"_a, "source"_a, "chunk"_a)
        .def("summed", &gemm_reduce::Geometry::summed, "tile"_a)
        .def("released", &gemm_reduce::Geometry::released, "rank"_a);

    py::class_<sim::StrictOptions>(module, "Strict")
        .def(py::init([](std::optional<std::uint64_t> seed, const std::string& kind,
                         std::uint32_t index, std::vector<std::uint32_t> numbers) {
                 return sim::StrictOptions{
                     seed,
                     {kind == "comm" ? sim::CoreKind::aiv : sim::CoreKind::aic, index,
                      std::move(numbers)}};
             }),
             py::kw_only(), "seed"_a = py::none(), "skip_kernel"_a = "compute", "skip_core"_a = 0,
             "skip"_a = std::vector<std::uint32_t>());

    py::class_<host::Launch, std::shared_ptr<host::Launch>>(module, "Launch")
        .def(
            "wait",
            [](host::Launch& self, double timeout_s) { return self.wait(nanoseconds(timeout_s)); },
            "timeout_s"_a, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("comm_seconds", &host::Launch::comm_seconds)
        .def_property_readonly("compute_seconds", &host::Launch::compute_seconds)
        .def("trace", [](const host::Launch& self) { return py::bytes(self.trace()); });

    // `geometry` says which op it is.
    module.def("launch", &launch, py::kw_only(), "geometry"_a, "rank"_a, "a"_a, "b"_a, "out"_a,
               "out_dtype"_a, "epoch"_a, "number"_a, "pad"_a, "workspace"_a, "signal_base"_a,
               "region"_a, "peers"_a, "order"_a, "compute_blocks"_a, "comm_blocks"_a, "node"_a,
               "fifo"_a, "timeout_s"_a, "view"_a, "trace"_a, "strict"_a = py::none());

    module.def("record", &record, py::kw_only(), "geometry"_a, "rank"_a, "same_node"_a, "order"_a,
               "a"_a, "b"_a, "out"_a, "out_dtype"_a, "compute_blocks"_a, "comm_blocks"_a, "node"_a);

    py::class_<sim::Machine> machine(module, "Machine");
    machine.def(py::init());
#define MKERNEL_FIELD(NAME) machine.def_readwrite(#NAME, &sim::Machine::NAME)
    MKERNEL_FIELD(launch_ns);
    MKERNEL_FIELD(issue_ns);
    MKERNEL_FIELD(signal_ns);
    MKERNEL_FIELD(macs_per_ns_16);
    MKERNEL_FIELD(macs_per_ns_32);
    MKERNEL_FIELD(matmul_ns);
    MKERNEL_FIELD(extract_rate);
    MKERNEL_FIELD(extract_ns);
    MKERNEL_FIELD(load_rate);
    MKERNEL_FIELD(store_rate);
    MKERNEL_FIELD(put_rate);
    MKERNEL_FIELD(memory_ns);
    MKERNEL_FIELD(memory_rate);
    MKERNEL_FIELD(link_rate);
    MKERNEL_FIELD(link_ns);
    MKERNEL_FIELD(egress_rate);
    MKERNEL_FIELD(ingress_rate);
    MKERNEL_FIELD(proxy_ns);
    MKERNEL_FIELD(nic_rate);
    MKERNEL_FIELD(nic_ns);
#undef MKERNEL_FIELD
    module.def(
        "replay",
        [](const std::vector<std::string>& traces, const sim::Machine& machine,
           const std::string& view, bool keep_spans) {
            ReplayResult result;
            {
                const py::gil_scoped_release release;
                result = replay(traces, machine, view, keep_spans);
            }
            return std::tuple(std::get<0>(result), std::get<1>(result),
                              py::bytes(std::get<2>(result)));
        },
        "traces"_a, "machine"_a, "view"_a, "keep_spans"_a);

    module.def("matrix_unit", [] { return std::string(sim::matrix_unit().name); });
    module.def(
        "set_slots", [](unsigned slots) { sim::Scheduler::process().set_slots(slots); }, "slots"_a,
        py::call_guard<py::gil_scoped_release>());
    module.def("slots", [] { return sim::Scheduler::process().slots(); });

    // At interpreter exit: end what still runs, join the host threads of the simulated cores.
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        const py::gil_scoped_release release;
        host::Launch::cancel_all();
        sim::Scheduler::shutdown_process();
    }));
}

}  // namespace mkernel::ascend
