#include "backends/accelerators/ascend/host/launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>

#include "backends/accelerators/ascend/kernels/ag_gemm/arrival.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/comm.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/compute.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/send_order.hpp"

namespace mkernel::ascend::host {

using ag_gemm::Geometry;
using runtime::monotonic_ns;

namespace {

std::mutex g_running_mutex;
std::set<Launch*> g_running;

sim::OnChip& thread_memory() {
    thread_local sim::OnChip memory;
    return memory;
}

std::uint64_t span_bytes(const isa::GlobalView& view) {
    return static_cast<std::uint64_t>(view.at(view.rows - 1, view.cols - 1) - view.base) +
           isa::bytes_of(view.dtype);
}

void refuse(const std::string& what) {
    throw std::invalid_argument(what);
}

}  // namespace

void check_tiles(const Geometry& g) {
    const auto fits = [](const char* what, std::uint64_t bytes, isa::Buffer buffer) {
        if (bytes > isa::capacity_of(buffer)) {
            refuse(std::string("plan.chunking: ") + what + " takes " + std::to_string(bytes) +
                   " bytes of " + isa::name_of(buffer) + ", which has " +
                   std::to_string(isa::capacity_of(buffer)) + "; choose smaller tiles");
        }
    };
    const std::uint64_t size = isa::bytes_of(g.dtype);
    if (g.tile_m % 16 != 0) refuse("plan.chunking.tile_m must be a multiple of 16");
    if (g.tile_n % 32 != 0) refuse("plan.chunking.tile_n must be a multiple of 32");
    if (g.step_k % 16 != 0) refuse("plan.chunking.step_k must be a multiple of 16");
    if (g.tile_k % g.step_k != 0) refuse("plan.chunking.tile_k must be a multiple of step_k");
    const std::uint64_t a = std::uint64_t{g.tile_m} * g.tile_k * size;
    const std::uint64_t b = std::uint64_t{g.tile_k} * g.tile_n * size;
    fits("double-buffered A and B (2 * tile_k * (tile_m + tile_n))", 2 * (a + b), isa::Buffer::L1);
    fits("double-buffered A (2 * tile_m * step_k)", 2 * size * g.tile_m * g.step_k,
         isa::Buffer::L0A);
    fits("double-buffered B (2 * step_k * tile_n)", 2 * size * g.step_k * g.tile_n,
         isa::Buffer::L0B);
    fits("the output tile (tile_m * tile_n float32)", std::uint64_t{4} * g.tile_m * g.tile_n,
         isa::Buffer::L0C);
    fits("double-buffered chunks (2 * tile_m * tile_k)", 2 * a, isa::Buffer::UB);
    if (g.world > ag_gemm::kMaxWorld) {
        refuse("a world of " + std::to_string(g.world) + " ranks; at most " +
               std::to_string(ag_gemm::kMaxWorld));
    }
}

Launch::Launch(Call call) : call_(std::move(call)) {
    ag_gemm::Args& args = call_.args;
    const Geometry& g = args.geometry;
    args.peers = call_.peers.data();
    args.source_order = call_.source_order.data();
    const auto near = static_cast<std::uint32_t>(
        std::count_if(call_.peers.begin(), call_.peers.end(),
                      [](const ag_gemm::Peer& peer) { return peer.pad != nullptr; }));
    send_order_ = ag_gemm::send_order(g, call_.compute_blocks, near - 1);
    args.send_order = send_order_.data();
    args.ignore_chunks = call_.view == View::compute_only;

    environment_.pad = runtime::SignalPad(args.pad);
    environment_.fifo = call_.fifo;
    environment_.deadline_ns = monotonic_ns() + call_.timeout_ns;
    environment_.rank = args.rank;
    environment_.op = call_.number;
    environment_.scheduler = &sim::Scheduler::process();
    auto& memory = environment_.memory;
    memory.push_back({args.a.base, span_bytes(args.a), false});
    memory.push_back({args.b.base, span_bytes(args.b), false});
    memory.push_back({args.out.base, span_bytes(args.out), true});
    if (g.world > 1) {
        memory.push_back({args.workspace, g.workspace_bytes(), true});
        for (const auto& peer : call_.peers) {
            if (peer.workspace == nullptr || peer.workspace == args.workspace) continue;
            memory.push_back({peer.workspace, g.workspace_bytes(), true});
        }
    }

    comm_.kind = sim::CoreKind::aiv;
    comm_.blocks = g.world > 1 && call_.view != View::compute_only ? call_.comm_blocks : 0;
    compute_.kind = sim::CoreKind::aic;
    compute_.blocks = call_.compute_blocks;
    environment_.strict = call_.strict;
}

std::shared_ptr<Launch> Launch::start(Call call) {
    check_tiles(call.args.geometry);
    const std::shared_ptr<Launch> launch(new Launch(std::move(call)));
    {
        const std::lock_guard lock(g_running_mutex);
        g_running.insert(launch.get());
    }
    launch->kernels_left_ = launch->comm_.blocks > 0 ? 2 : 1;
    if (launch->call_.strict) {
        launch->waits_.emplace(launch->environment_.pad, launch->environment_.rank,
                               launch->comm_.blocks + launch->compute_.blocks);
        launch->environment_.waits = &*launch->waits_;
    }
    if (launch->call_.view == View::compute_only) launch->count_chunks_as_present();
    const bool one_after_other = launch->call_.view == View::sequential && launch->comm_.blocks > 0;
    if (launch->comm_.blocks > 0) launch->submit(launch->comm_);
    if (!one_after_other) launch->submit(launch->compute_);
    return launch;
}

// Without a communication kernel nobody raises the flags that later calls count on.
void Launch::count_chunks_as_present() {
    const ag_gemm::Args& args = call_.args;
    const Geometry& g = args.geometry;
    for (std::uint32_t source = 0; source < g.world; ++source) {
        if (source == args.rank) continue;
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            environment_.pad.add(args.signal_base + g.flag(args.parity(), source, chunk), 1);
        }
        if (args.same_node(source)) {
            environment_.pad.add(args.signal_base + g.summary(args.parity(), source), g.chunks());
        }
    }
}

void Launch::submit(Kernel& kernel) {
    kernel.left = kernel.blocks;
    if (call_.trace) kernel.records.resize(kernel.blocks);
    kernel.start_ns = monotonic_ns();
    std::vector<sim::Scheduler::Task> tasks;
    for (std::uint32_t i = 0; i < kernel.blocks; ++i) {
        tasks.emplace_back([self = shared_from_this(), &kernel, i] { self->run_core(kernel, i); });
    }
    environment_.scheduler->submit(kernel.kind == sim::CoreKind::aiv ? 0 : 1, std::move(tasks));
}

void Launch::run_kernel(Kernel& kernel, std::uint32_t index) {
    sim::Core core(environment_, kernel.kind, index, kernel.blocks, thread_memory(),
                   call_.trace ? &kernel.records[index] : nullptr);
    const bool complete = kernel.kind == sim::CoreKind::aiv
                              ? ag_gemm::Comm(core, call_.args).run()
                              : ag_gemm::Compute(core, call_.args).run();
    core.finish(complete);
    if (complete && waits_) waits_->ended();
}

void Launch::run_core(Kernel& kernel, std::uint32_t index) {
    guarded(kernel, index, [&] { run_kernel(kernel, index); });
    if (--kernel.left == 0) kernel_ended(kernel);
}

void Launch::guarded(const Kernel& kernel, std::uint32_t index, const std::function<void()>& body) {
    try {
        body();
    } catch (const std::exception& error) {
        {
            const std::lock_guard lock(mutex_);
            if (error_.empty()) error_ = error.what();
        }
        // The other cores, here and at the peers, must not wait for this one until the deadline.
        environment_.pad.abort(
            runtime::AbortCode::peer_failure,
            {.waiter = kernel.kind == sim::CoreKind::aiv ? runtime::Waiter::comm_kernel
                                                         : runtime::Waiter::compute_kernel,
             .core = index,
             .peer = environment_.rank,
             .chunk = sim::kNoChunk,
             .op = environment_.op});
    }
}

void Launch::kernel_ended(Kernel& kernel) {
    if (&kernel == &comm_ && call_.view == View::sequential) {
        environment_.scheduler->submit(0, {[self = shared_from_this()] { self->arrived(); }});
    } else {
        count_ended(kernel);
    }
}

// Sequential view: communication has ended here when the other ranks' chunks are in place too.
void Launch::arrived() {
    guarded(comm_, 0, [this] {
        sim::Core core(environment_, comm_.kind, 0, 1, thread_memory(), nullptr);
        core.finish(ag_gemm::await_arrival(core, call_.args));
    });
    submit(compute_);
    count_ended(comm_);
}

void Launch::count_ended(Kernel& kernel) {
    kernel.end_ns = monotonic_ns();
    const std::lock_guard lock(mutex_);
    if (--kernels_left_ > 0) return;
    {
        const std::lock_guard running(g_running_mutex);
        g_running.erase(this);
    }
    ended_.notify_all();
}

std::string record(Call call) {
    check_tiles(call.args.geometry);
    const Geometry& g = call.args.geometry;
    // Distinct ranges that nobody dereferences.
    std::uintptr_t next = std::uintptr_t{1} << 44;
    const auto invent = [&next] {
        return reinterpret_cast<std::byte*>(next += std::uintptr_t{1} << 40);
    };
    for (isa::GlobalView* tensor : {&call.args.a, &call.args.b, &call.args.out}) {
        tensor->base = invent();
    }
    call.args.pad = call.args.workspace = invent();
    for (std::uint32_t peer = 0; peer < g.world; ++peer) {
        if (call.peers[peer].pad == nullptr) continue;
        call.peers[peer].workspace = peer == call.args.rank ? call.args.workspace : invent();
    }
    call.trace = true;
    Launch launch(std::move(call));
    launch.environment_.dry = true;
    for (Launch::Kernel* kernel : {&launch.comm_, &launch.compute_}) {
        kernel->records.resize(kernel->blocks);
        for (std::uint32_t i = 0; i < kernel->blocks; ++i) launch.run_kernel(*kernel, i);
    }
    return launch.trace();
}

bool Launch::wait(std::uint64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    // wait_until(steady) is not known to ThreadSanitizer in g++ 12; a system-clock step only
    // shortens or lengthens one slice.
    const bool done = ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                      [&] { return kernels_left_ == 0; });
    if (done && !error_.empty()) throw sim::IsaError(error_);
    return done;
}

void Launch::cancel_all() {
    const std::lock_guard lock(g_running_mutex);
    for (Launch* launch : g_running) {
        if (launch->process_ != getpid()) continue;
        launch->environment_.pad.abort(runtime::AbortCode::cancelled,
                                       {.waiter = runtime::Waiter::host,
                                        .peer = launch->environment_.rank,
                                        .chunk = sim::kNoChunk,
                                        .op = launch->environment_.op});
    }
}

std::string Launch::trace() const {
    if (!call_.trace) return {};
    const ag_gemm::Args& args = call_.args;
    const Geometry& g = args.geometry;
    std::vector<sim::TraceBaseline> baselines;
    const auto before = [&](std::uint32_t first, std::uint32_t count, std::uint64_t value) {
        baselines.push_back({args.signal_base + first, count, value});
    };
    const std::uint64_t uses = args.uses() - 1;
    before(g.flag(args.parity(), 0, 0), g.world * g.chunks(), uses);
    before(g.summary(args.parity(), 0), g.world, uses * g.chunks());
    before(g.released(0), g.world, args.epoch - 1);
    before(g.finished(), 1, (args.epoch - 1) * call_.compute_blocks);

    std::string blob;
    const auto append = [&blob](const auto* data, std::size_t count) {
        blob.append(reinterpret_cast<const char*>(data), count * sizeof(*data));
    };
    const sim::TraceHeader header{.rank = args.rank,
                                  .world = g.world,
                                  .node = call_.node,
                                  .baselines = static_cast<std::uint32_t>(baselines.size()),
                                  .cores = comm_.blocks + compute_.blocks};
    append(&header, 1);
    append(baselines.data(), baselines.size());
    for (const Kernel* kernel : {&comm_, &compute_}) {
        for (std::uint32_t i = 0; i < kernel->blocks; ++i) {
            const auto& records = kernel->records[i];
            const sim::TraceCore core{kernel->kind, i, records.size()};
            append(&core, 1);
            append(records.data(), records.size());
        }
    }
    return blob;
}

}  // namespace mkernel::ascend::host
