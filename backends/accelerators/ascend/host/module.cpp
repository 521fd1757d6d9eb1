// Python bindings of the ascend backend. Every function that blocks releases the GIL; no native thread ever
// calls Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/bind.hpp"
#include "backends/accelerators/ascend/host/launch.hpp"
#include "backends/accelerators/ascend/sim/matrix_unit.hpp"
#include "backends/accelerators/ascend/sim/replay.hpp"
#include "backends/accelerators/ascend/sim/scheduler.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::ascend {
namespace {

std::uint64_t nanoseconds(double seconds) {
    return static_cast<std::uint64_t>(std::llround(std::min(std::max(seconds, 0.0), 1e9) * 1e9));
}

sim::View view_named(const std::string& name) {
    return name == "sequential"     ? sim::View::sequential
           : name == "compute_only" ? sim::View::compute_only
                                    : sim::View::pipelined;
}

void check(const host::Call& call, std::size_t peers) {
    const std::uint32_t world = call.kernels->world();
    if (peers != world || call.args.rank >= world) {
        throw py::value_error("rank " + std::to_string(call.args.rank) + " and " +
                              std::to_string(peers) + " peers do not fit a world of " +
                              std::to_string(world));
    }
    if (call.blocks.comm == 0 || call.blocks.cube + call.blocks.vector == 0) {
        throw py::value_error("each kernel must have at least 1 block");
    }
}

// (comm, cube, vector)
using BlockCounts = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

host::Blocks blocks_of(const BlockCounts& counts) {
    return {std::get<0>(counts), std::get<1>(counts), std::get<2>(counts)};
}

// The places in a workspace of the parts of its memory (kernels/call.hpp): inboxes of even and odd epochs,
// outboxes of even and odd epochs, scratch.
using Areas = std::array<std::uint64_t, 5>;

std::shared_ptr<host::Launch> launch(
    std::shared_ptr<host::Kernels> kernels, std::uint32_t rank, std::uint64_t epoch,
    std::uint32_t number, std::uint64_t pad, std::uint64_t workspace, const Areas& areas,
    std::uint32_t region, const std::vector<std::pair<std::uint64_t, std::uint64_t>>& peers,
    const BlockCounts& blocks, std::uint32_t node, std::uint64_t fifo, double begun_s,
    double timeout_s, const std::string& view_name, bool trace,
    std::optional<sim::StrictOptions> strict, bool log_races) {
    host::Call call;
    call.strict = std::move(strict);
    call.log_races = log_races;
    call.kernels = std::move(kernels);
    call.args.rank = rank;
    call.args.epoch = epoch;
    call.args.pad = pointer<std::byte>(pad);
    const auto [even_inbox, odd_inbox, even_outbox, odd_outbox, scratch] = areas;
    const bool odd = (epoch & 1) != 0;
    call.args.channel.inbox = odd ? odd_inbox : even_inbox;
    call.args.channel.outbox = odd ? odd_outbox : even_outbox;
    call.args.inbox = pointer<std::byte>(workspace + call.args.channel.inbox);
    call.args.outbox = pointer<std::byte>(workspace + call.args.channel.outbox);
    call.args.scratch = pointer<std::byte>(workspace + scratch);
    call.args.channel.region = region;
    for (const auto& [peer_pad, peer_workspace] : peers) {
        const bool near = peer_pad != 0;
        call.peers.push_back(
            {pointer<std::byte>(peer_pad),
             pointer<std::byte>(near ? peer_workspace + call.args.channel.inbox : 0)});
    }
    call.blocks = blocks_of(blocks);
    call.number = number;
    call.node = node;
    call.fifo = pointer<const transport::FifoHandle>(fifo);
    call.begun_ns = nanoseconds(begun_s);
    call.timeout_ns = nanoseconds(timeout_s);
    call.trace = trace;
    call.view = view_named(view_name);
    check(call, peers.size());
    if (epoch == 0) throw py::value_error("epochs begin at 1");
    const transport::SignalPad signals(call.args.pad);
    if (!signals.valid()) throw py::value_error("pad does not hold a formatted signal pad");
    if (const std::uint64_t words = call.kernels->words(); words > signals.capacity()) {
        throw py::value_error("the plan needs " + std::to_string(words) +
                              " words of a signal pad, which has " +
                              std::to_string(signals.capacity()) + "; cut it in larger chunks");
    }
    const py::gil_scoped_release release;
    return host::Launch::start(std::move(call));
}

py::bytes record(std::shared_ptr<host::Kernels> kernels, std::uint32_t rank,
                 const std::vector<bool>& same_node, const BlockCounts& blocks,
                 std::uint32_t node) {
    host::Call call;
    call.kernels = std::move(kernels);
    call.args.rank = rank;
    for (const bool near : same_node) {
        call.peers.push_back({near ? pointer<std::byte>(1) : nullptr, nullptr});
    }
    call.blocks = blocks_of(blocks);
    call.node = node;
    check(call, same_node.size());
    std::string blob;
    {
        const py::gil_scoped_release release;
        blob = host::record(std::move(call));
    }
    return py::bytes(blob);
}

// (total, [(rank, kernel, start, end)], spans as bytes); times in ns.
using KernelTimes = std::vector<std::tuple<std::uint32_t, std::string, double, double>>;
std::tuple<double, KernelTimes, py::bytes> replay(const std::vector<py::bytes>& traces,
                                                  const sim::Machine& machine,
                                                  const std::string& view, bool keep_spans) {
    std::vector<std::string> copies;
    for (const auto& trace : traces) copies.emplace_back(std::string_view(trace));
    sim::Replay run;
    {
        const py::gil_scoped_release release;
        run = sim::replay(copies, machine, view_named(view), keep_spans);
    }
    KernelTimes kernels;
    for (const auto& each : run.kernels) {
        kernels.emplace_back(each.rank, name_of(each.kernel), each.start_ns, each.end_ns);
    }
    return {run.total_ns, std::move(kernels),
            py::bytes(reinterpret_cast<const char*>(run.spans.data()),
                      run.spans.size() * sizeof(sim::Span))};
}

}  // namespace

PYBIND11_MODULE(_ascend, module) {
    module.doc() = "Simulator and kernels of the ascend backend.";

    // The kernels that a launch or a record runs: one object a call, made by the op's factory.
    py::class_<host::Kernels, std::shared_ptr<host::Kernels>>(module, "Kernels");
    bind_gemm(module);
    bind_moe(module);
    bind_ring_attention(module);

    py::class_<sim::StrictOptions>(module, "Strict")
        .def(py::init([](std::optional<std::uint64_t> seed, const std::string& role,
                         std::uint32_t index, std::vector<std::uint32_t> numbers,
                         std::vector<std::uint32_t> waits) {
                 return sim::StrictOptions{seed,
                                           {role == "comm"     ? sim::Role::comm
                                            : role == "vector" ? sim::Role::vector
                                                               : sim::Role::cube,
                                            index, std::move(numbers), std::move(waits)}};
             }),
             py::kw_only(), "seed"_a = py::none(), "skip_role"_a = "cube", "skip_core"_a = 0,
             "skip"_a = std::vector<std::uint32_t>(),
             "skip_waits"_a = std::vector<std::uint32_t>());

    py::class_<host::Launch, std::shared_ptr<host::Launch>>(module, "Launch")
        .def(
            "wait",
            [](host::Launch& self, double timeout_s) { return self.wait(nanoseconds(timeout_s)); },
            "timeout_s"_a, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("comm_seconds", &host::Launch::comm_seconds)
        .def_property_readonly("compute_seconds", &host::Launch::compute_seconds)
        .def_property_readonly("at_deadline", &host::Launch::at_deadline)
        .def("trace", [](const host::Launch& self) { return py::bytes(self.trace()); })
        .def("race_log", [](const host::Launch& self) { return py::bytes(self.race_log()); });

    module.def("launch", &launch, py::kw_only(), "kernels"_a, "rank"_a, "epoch"_a, "number"_a,
               "pad"_a, "workspace"_a, "areas"_a, "region"_a, "peers"_a, "blocks"_a, "node"_a,
               "fifo"_a, "begun_s"_a, "timeout_s"_a, "view"_a, "trace"_a, "strict"_a = py::none(),
               "log_races"_a = false);

    module.def("record", &record, py::kw_only(), "kernels"_a, "rank"_a, "same_node"_a, "blocks"_a,
               "node"_a);

    py::class_<sim::Machine> machine(module, "Machine");
    machine.def(py::init());
#define MKERNEL_FIELD(NAME) machine.def_readwrite(#NAME, &sim::Machine::NAME)
    MKERNEL_FIELD(launch_ns);
    MKERNEL_FIELD(issue_ns);
    MKERNEL_FIELD(signal_ns);
    MKERNEL_FIELD(scalar_ns);
    MKERNEL_FIELD(macs_per_ns_16);
    MKERNEL_FIELD(macs_per_ns_32);
    MKERNEL_FIELD(matmul_ns);
    MKERNEL_FIELD(extract_rate);
    MKERNEL_FIELD(extract_ns);
    MKERNEL_FIELD(vector_rate);
    MKERNEL_FIELD(load_rate);
    MKERNEL_FIELD(store_rate);
    MKERNEL_FIELD(put_rate);
    MKERNEL_FIELD(memory_ns);
    MKERNEL_FIELD(memory_rate);
    MKERNEL_FIELD(hbm_rate);
    MKERNEL_FIELD(link_rate);
    MKERNEL_FIELD(link_ns);
    MKERNEL_FIELD(egress_rate);
    MKERNEL_FIELD(ingress_rate);
    MKERNEL_FIELD(proxy_ns);
    MKERNEL_FIELD(nic_rate);
    MKERNEL_FIELD(nic_ns);
#undef MKERNEL_FIELD
    module.def(
        "race_between",
        [](const std::vector<std::vector<py::bytes>>& ranks) {
            std::vector<std::vector<std::string>> copies;
            for (const auto& logs : ranks) copies.emplace_back(logs.begin(), logs.end());
            const py::gil_scoped_release release;
            return sim::race_between(copies);
        },
        "ranks"_a);
    module.def("replay", &replay, "traces"_a, "machine"_a, "view"_a, "keep_spans"_a);

    module.def("matrix_unit", [] { return std::string(sim::matrix_unit().name); });
    module.def(
        "set_slots", [](unsigned slots) { sim::Scheduler::process().set_slots(slots); }, "slots"_a,
        py::call_guard<py::gil_scoped_release>());

    // At interpreter exit, ends every launch that still runs, and joins the host threads of the simulated
    // cores.
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        const py::gil_scoped_release release;
        host::Launch::cancel_all();
        sim::Scheduler::shutdown_process();
    }));
}

}  // namespace mkernel::ascend
