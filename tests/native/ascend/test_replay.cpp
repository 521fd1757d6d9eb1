// The timed model on traces small enough to compute by hand.
#include <cmath>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/sim/replay.hpp"
#include "tests/native/ascend/check.hpp"

using namespace mkernel::ascend;
using isa::Pipe;
using sim::Kind;
using sim::Record;
using sim::Role;
using test::thrown;

namespace {

struct Core {
    Role kind;
    std::uint32_t index;
    std::vector<Record> records;
};

std::string trace(std::uint32_t rank, std::uint32_t world, const std::vector<Core>& cores,
                  std::uint32_t node = 0) {
    std::string blob;
    const auto append = [&blob](const auto& value) {
        blob.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    append(sim::TraceHeader{.rank = rank,
                            .world = world,
                            .node = node,
                            .cores = static_cast<std::uint32_t>(cores.size())});
    for (const Core& core : cores) {
        append(sim::TraceCore{core.kind, core.index, core.records.size()});
        for (const Record& record : core.records) append(record);
    }
    return blob;
}

Record load(std::uint64_t bytes) {
    return {.kind = Kind::tload, .pipe = Pipe::MTE2, .amount = bytes};
}
Record matmul(std::uint64_t macs) {
    return {.kind = Kind::tmatmul, .pipe = Pipe::M, .amount = macs, .width = 2};
}
Record put(std::uint32_t peer, std::uint64_t bytes) {
    return {.kind = Kind::tput, .pipe = Pipe::MTE3, .peer = peer, .amount = bytes};
}
Record set(Pipe from, Pipe to) {
    return {.kind = Kind::set_flag, .pipe = from, .other = to};
}
Record wait(Pipe from, Pipe to) {
    return {.kind = Kind::wait_flag, .pipe = from, .other = to};
}
Record fence() {
    return {.kind = Kind::fence};
}
Record notify(std::uint32_t peer, std::uint32_t signal, std::uint64_t value = 1) {
    return {.kind = Kind::tnotify, .signal = signal, .peer = peer, .amount = value};
}
Record await(std::uint32_t peer, std::uint32_t signal, std::uint64_t value = 1) {
    return {.kind = Kind::twait, .chunk = 4, .signal = signal, .peer = peer, .amount = value};
}

// Rates in bytes a ns; issue costs nothing unless a test says so.
sim::Machine machine() {
    sim::Machine m;
    m.macs_per_ns_16 = 100;
    m.load_rate = 10;
    m.memory_rate = 1000;
    m.hbm_rate = 1000;
    m.put_rate = 50;
    m.link_rate = 5;
    m.egress_rate = 1000;
    m.ingress_rate = 1000;
    m.nic_rate = 4;
    return m;
}

double total(const std::vector<std::string>& traces, const sim::Machine& m,
             sim::View view = sim::View::pipelined) {
    return sim::replay(traces, m, view, false).total_ns;
}

bool near(double a, double b) {
    return std::abs(a - b) < 1e-6;
}

void pipes_run_side_by_side_unless_flags_order_them() {
    const auto m = machine();
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, {load(1000), matmul(5000)}}})}, m), 100));
    const std::vector<Record> ordered{load(1000), set(Pipe::MTE2, Pipe::M),
                                      wait(Pipe::MTE2, Pipe::M), matmul(5000)};
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, ordered}})}, m), 150));
    // A fence holds S, and so what S issues later, until the pipes are drained.
    CHECK(
        near(total({trace(0, 1, {{Role::cube, 0, {load(1000), fence(), matmul(5000)}}})}, m), 150));
    // Double buffering: three loads of 100, three products of 50, one buffer ahead: 300 + 50.
    std::vector<Record> stream;
    for (int i = 0; i < 3; ++i) {
        for (const Record& each : ordered) stream.push_back(each);
    }
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, stream}})}, m), 350));
}

void latency_overlaps_and_issue_does_not() {
    auto m = machine();
    m.memory_ns = 40;
    const std::vector<Record> loads{load(1000), load(1000), fence()};
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, loads}})}, m), 240));
    m.issue_ns = 500;
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, {load(1000), load(1000)}}})}, m), 1140));
    m.launch_ns = 1000;
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, {load(1000), load(1000)}}})}, m), 2140));
}

void a_fence_of_one_pipe_waits_for_that_one() {
    auto m = machine();
    Record one = fence();
    one.pipe = Pipe::M;
    const std::vector<Record> records{load(1000), matmul(2000), one, matmul(5000)};
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, records}})}, m), 100));
    one.pipe = Pipe::MTE2;
    const std::vector<Record> other{load(1000), matmul(2000), one, matmul(5000)};
    CHECK(near(total({trace(0, 1, {{Role::cube, 0, other}})}, m), 150));
}

// Pieces of inputs come from HBM once, on each rank.
void inputs_are_read_from_hbm_once() {
    auto m = machine();
    m.hbm_rate = 2;
    Record cold = load(1000), other = load(1000);
    cold.signal = 7;
    other.signal = 8;
    const auto one = [&](std::vector<Record> records) {
        return total({trace(0, 1, {{Role::cube, 0, std::move(records)}})}, m);
    };
    CHECK(near(one({load(1000), load(1000)}), 200));
    CHECK(near(one({cold, cold}), 600));
    CHECK(near(one({cold, other}), 1000));
}

void shared_resources_are_shared() {
    auto m = machine();
    m.memory_rate = 10;  // one core's rate: two cores take turns
    CHECK(near(
        total({trace(0, 1, {{Role::cube, 0, {load(1000)}}, {Role::cube, 1, {load(1000)}}})}, m),
        200));
    m = machine();
    // Two cores on one link; on two links; on two links behind one egress.
    const std::string idle1 = trace(1, 3, {}), idle2 = trace(2, 3, {});
    const auto two = [&](std::uint32_t first, std::uint32_t second) {
        return trace(0, 3,
                     {{Role::comm, 0, {put(first, 1000)}}, {Role::comm, 1, {put(second, 1000)}}});
    };
    CHECK(near(total({two(1, 1), idle1, idle2}, m), 400));
    CHECK(near(total({two(1, 2), idle1, idle2}, m), 200));
    m.egress_rate = 5;
    CHECK(near(total({two(1, 2), idle1, idle2}, m), 400));
    // What one core puts to a rank, and another one gets from there, is on two links.
    m = machine();
    Record get = put(1, 1000);
    get.kind = Kind::tget;
    const auto both = [&](const Record& first, const Record& second) {
        return trace(0, 3, {{Role::comm, 0, {first}}, {Role::comm, 1, {second}}});
    };
    CHECK(near(total({both(put(1, 1000), get), idle1, idle2}, m), 200));
    CHECK(near(total({both(get, get), idle1, idle2}, m), 400));
    m.ingress_rate = 5;  // of this rank, by two that give
    Record other = get;
    other.peer = 2;
    CHECK(near(total({both(get, other), idle1, idle2}, m), 400));
    m = machine();
    m.link_ns = 30;  // asked, and given
    CHECK(near(total({trace(0, 3, {{Role::comm, 0, {get, fence()}}}), idle1, idle2}, m), 260));
    // Two ranks into one.
    m = machine();
    m.ingress_rate = 5;
    CHECK(near(total({trace(0, 3, {{Role::comm, 0, {put(2, 1000)}}}),
                      trace(1, 3, {{Role::comm, 0, {put(2, 1000)}}}), idle2},
                     m),
               400));
}

void signals_cross_ranks() {
    auto m = machine();
    m.signal_ns = 7;
    m.link_ns = 3;
    const std::string sender =
        trace(0, 2, {{Role::comm, 0, {put(1, 1000), fence(), notify(1, 5)}}});
    const std::string receiver = trace(1, 2, {{Role::cube, 0, {await(0, 5), matmul(1000)}}});
    CHECK(near(total({sender, receiver}, m), 200 + 3 + 7 + 10));
    CHECK(near(total({sender, receiver}, m, sim::View::compute_only), 10));
    // Sequential: compute starts when all that was sent has arrived.
    CHECK(near(total({sender, receiver}, m, sim::View::sequential), 200 + 3 + 7 + 10));
    const std::string later = trace(1, 2, {{Role::cube, 0, {matmul(1000), await(0, 5)}}});
    CHECK(near(total({sender, later}, m), 210));
    CHECK(near(total({sender, later}, m, sim::View::sequential), 220));
    // A wait for nothing that this call adds.
    const std::string third = trace(1, 2, {{Role::cube, 0, {await(0, 5, 0), matmul(1000)}}});
    CHECK(near(total({sender, third}, m), 203));  // until the sender's fence
}

void parts_of_the_compute_kernel_meet_in_every_view() {
    auto m = machine();
    m.vector_rate = 20;
    const Record sums{.kind = Kind::trowsum, .pipe = Pipe::V, .amount = 600};
    const std::vector<Record> cube{await(1, 5), matmul(1000), fence(), notify(0, 6)};
    const std::vector<Record> vector{await(0, 6), sums};
    const std::string rank = trace(0, 2, {{Role::cube, 0, cube}, {Role::vector, 0, vector}});
    const std::string sender =
        trace(1, 2, {{Role::comm, 0, {put(0, 1000), fence(), notify(0, 5)}}});
    CHECK(near(total({rank, sender}, m), 200 + 10 + 30));
    // The sender's signal counts as there, the cube part's is waited for.
    CHECK(near(total({rank, sender}, m, sim::View::compute_only), 10 + 30));
    // What the own communication kernel raises is there as well.
    const std::string own = trace(
        0, 1,
        {{Role::vector, 0, {await(0, 7), sums}}, {Role::comm, 0, {sums, fence(), notify(0, 7)}}});
    CHECK(near(total({own}, m), 60));
    CHECK(near(total({own}, m, sim::View::compute_only), 30));
}

void nic_puts_carry_their_signal() {
    auto m = machine();
    m.proxy_ns = 11;
    m.nic_ns = 6;
    const Record far{.kind = Kind::nic_put, .signal = 5, .peer = 1, .amount = 400, .value = 2};
    const std::string sender = trace(0, 2, {{Role::comm, 0, {far, far}}}, 0);
    const std::string receiver = trace(1, 2, {{Role::cube, 0, {await(0, 5, 4), matmul(1000)}}}, 1);
    CHECK(near(total({sender, receiver}, m), 11 + 100 + 100 + 6 + 10));
}

void what_never_ends_is_reported() {
    const auto m = machine();
    const auto says = [&](const std::vector<std::string>& traces, const char* part) {
        return test::has(thrown<sim::ReplayError>([&] { total(traces, m); }), part);
    };
    CHECK(says({trace(0, 2, {{Role::cube, 7, {await(1, 5, 2)}}}),
                trace(1, 2, {{Role::comm, 0, {notify(0, 5)}}})},
               "rank 0 AIC core 7 waits for signal 5 of rank 1, chunk 4: stands at 1, wanted 2"));
    CHECK(says({trace(0, 1, {{Role::cube, 0, {wait(Pipe::MTE2, Pipe::M), matmul(10)}}})},
               "rank 0 AIC core 0; pipe M at WAIT_FLAG MTE2→M event 0"));
    CHECK(
        says({trace(0, 1, {{Role::cube, 0, {wait(Pipe::MTE2, Pipe::S), matmul(10)}}})}, "core 0"));
}

}  // namespace

int main() {
    pipes_run_side_by_side_unless_flags_order_them();
    latency_overlaps_and_issue_does_not();
    a_fence_of_one_pipe_waits_for_that_one();
    inputs_are_read_from_hbm_once();
    shared_resources_are_shared();
    signals_cross_ranks();
    parts_of_the_compute_kernel_meet_in_every_view();
    nic_puts_carry_their_signal();
    what_never_ends_is_reported();
    return test::finish();
}
