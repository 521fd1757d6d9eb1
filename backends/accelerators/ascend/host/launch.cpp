#include "backends/accelerators/ascend/host/launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>

namespace mkernel::ascend::host {

using transport::monotonic_ns;

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

}  // namespace

Launch::Launch(Call call) : call_(std::move(call)) {
    CallArgs& args = call_.args;
    Kernels& kernels = *call_.kernels;
    args.peers = call_.peers.data();
    args.compute_only = call_.view == View::compute_only;
    kernels.bind(args, call_.blocks);

    environment_.pad = transport::SignalPad(args.pad);
    environment_.fifo = call_.fifo;
    environment_.deadline_ns = monotonic_ns() + call_.timeout_ns;
    if (call_.begun_ns != 0) {
        environment_.peers_wait_until_ns = call_.begun_ns + call_.timeout_ns;
    }
    environment_.rank = args.rank;
    environment_.op = call_.number;
    environment_.scheduler = &sim::Scheduler::process();
    auto& memory = environment_.memory;
    for (const auto& [view, writable] : kernels.tensors()) {
        memory.push_back({view->base, span_bytes(*view), writable});
    }
    const auto touched = [&memory](const std::byte* base, std::uint64_t bytes) {
        if (base != nullptr && bytes > 0) memory.push_back({base, bytes, true});
    };
    for (const Peer& peer : call_.peers) touched(peer.inbox, kernels.inbox_bytes());
    touched(args.outbox, kernels.outbox_bytes());
    touched(args.scratch, kernels.scratch_bytes());

    environment_.strict = call_.strict;

    const Blocks& blocks = call_.blocks;
    const bool communicates = kernels.communicates() && call_.view != View::compute_only;
    if (communicates) {
        comm_.parts.push_back({sim::Role::comm, blocks.comm, 0, &Kernels::comm, {}});
    }
    if (blocks.cube > 0) {
        compute_.parts.push_back({sim::Role::cube, blocks.cube, 0, &Kernels::cube, {}});
    }
    if (blocks.vector > 0) {
        compute_.parts.push_back(
            {sim::Role::vector, blocks.vector, blocks.comm, &Kernels::vector, {}});
    }
}

std::shared_ptr<Launch> Launch::start(Call call) {
    const std::shared_ptr<Launch> launch(new Launch(std::move(call)));
    launch->reserve();
    {
        const std::lock_guard lock(g_running_mutex);
        g_running.insert(launch.get());
    }
    const Call& started = launch->call_;
    const bool communicates = launch->comm_.blocks() > 0;
    launch->kernels_left_ = communicates ? 2 : 1;
    if (started.strict) {
        launch->waits_.emplace(launch->environment_.pad, launch->environment_.rank,
                               launch->comm_.blocks() + launch->compute_.blocks());
        launch->environment_.waits = &*launch->waits_;
        if (started.log_races) {
            std::vector<sim::Races::Range> shared;
            for (const Peer& peer : started.peers) {
                shared.push_back({peer.inbox, started.kernels->inbox_bytes()});
            }
            launch->race_log_.emplace(launch->environment_.rank, std::move(shared));
        }
        sim::RaceLog* log = launch->race_log_ ? &*launch->race_log_ : nullptr;
        launch->environment_.races =
            started.races ? started.races.get() : &launch->races_.emplace(log);
    }
    const bool one_after_other = started.view == View::sequential && communicates;
    const bool compute_first = started.kernels->compute_first();
    if (communicates && !(one_after_other && compute_first)) {
        launch->submit(launch->comm_);
    }
    if (!one_after_other || compute_first) launch->submit(launch->compute_);
    return launch;
}

void Launch::reserve() const {
    const std::size_t cores = comm_.blocks() + compute_.blocks();
    const bool looks = call_.view == View::sequential && !comm_.parts.empty();  // `arrived`
    try {
        environment_.scheduler->reserve(cores + (looks ? 1 : 0));
    } catch (const std::system_error& error) {
        throw std::runtime_error("no host thread for one of " + std::to_string(cores) +
                                 " simulated cores: " + error.code().message() +
                                 "; raise the limit of threads (`ulimit -u`, pids.max)");
    }
}

void Launch::submit(Kernel& kernel) {
    kernel.left = kernel.blocks();
    kernel.start_ns = monotonic_ns();
    for (Part& part : kernel.parts) {
        if (call_.trace) part.records.resize(part.blocks);
        std::vector<sim::Scheduler::Task> tasks;
        for (std::uint32_t i = 0; i < part.blocks; ++i) {
            tasks.emplace_back([self = shared_from_this(), &kernel, &part, i] {
                self->run_core(kernel, part, i);
            });
        }
        environment_.scheduler->submit(part.role == sim::Role::cube ? 1 : 0, std::move(tasks));
    }
}

void Launch::run_block(Part& part, std::uint32_t index) {
    sim::Core core(environment_, part.role, index, part.blocks, thread_memory(),
                   call_.trace ? &part.records[index] : nullptr);
    const bool complete = (call_.kernels.get()->*part.run)(core);
    core.finish(complete);
    if (complete && waits_) waits_->ended();
}

void Launch::run_core(Kernel& kernel, Part& part, std::uint32_t index) {
    guarded(kernel, index, [&] { run_block(part, index); });
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
        environment_.pad.abort(transport::AbortCode::peer_failure,
                               {.waiter = sim::waiter_of(kernel.name),
                                .core = index,
                                .peer = environment_.rank,
                                .chunk = sim::kNoChunk,
                                .op = environment_.op});
    }
}

void Launch::kernel_ended(Kernel& kernel) {
    const bool compute_first = call_.kernels->compute_first();
    const bool first = &kernel == (compute_first ? &compute_ : &comm_);
    if (call_.view != View::sequential || comm_.parts.empty() || !first) {
        count_ended(kernel);
    } else if (compute_first) {
        end_races();
        submit(comm_);
        count_ended(kernel);
    } else {
        environment_.scheduler->submit(0, {[self = shared_from_this()] { self->arrived(); }});
    }
}

// In the sequential view, communication has ended here when the data from other ranks is in place too.
void Launch::arrived() {
    guarded(comm_, 0, [this] {
        sim::Core core(environment_, sim::Role::comm, 0, 1, thread_memory(), nullptr);
        core.finish(call_.kernels->arrived(core));
    });
    end_races();
    submit(compute_);
    count_ended(comm_);
}

void Launch::end_races() {
    if (environment_.races != nullptr) environment_.races->end_kernel(environment_.rank);
}

void Launch::count_ended(Kernel& kernel) {
    kernel.end_ns = monotonic_ns();
    const std::lock_guard lock(mutex_);
    if (--kernels_left_ > 0) return;
    end_races();
    const transport::SignalPad& pad = environment_.pad;
    if (pad.aborted() == transport::AbortCode::none) {  // else there is no next call
        call_.kernels->each_amount([&pad](std::uint32_t word, std::uint64_t amount) {
            pad.expected(word).move_on(amount);
        });
    }
    {
        const std::lock_guard running(g_running_mutex);
        g_running.erase(this);
    }
    ended_.notify_all();
}

std::string record(Call call) {
    // Returns distinct ranges that nobody dereferences.
    std::uintptr_t next = std::uintptr_t{1} << 44;
    const auto invent = [&next] {
        return reinterpret_cast<std::byte*>(next += std::uintptr_t{1} << 40);
    };
    std::vector<const std::byte*> real;
    for (const auto& [view, writable] : call.kernels->tensors()) {
        if (view->base == nullptr) {
            view->base = invent();
        } else {
            real.push_back(view->base);
        }
    }
    for (std::byte** each : {&call.args.pad, &call.args.outbox, &call.args.scratch}) {
        *each = invent();
    }
    for (Peer& peer : call.peers) {
        if (peer.pad != nullptr) peer.inbox = invent();
    }
    call.args.inbox = call.peers[call.args.rank].inbox;
    call.trace = true;
    Launch launch(std::move(call));
    launch.environment_.dry = true;
    for (sim::GmRange& range : launch.environment_.memory) {
        range.real = std::find(real.begin(), real.end(), range.base) != real.end();
    }
    sim::Core alone(launch.environment_, sim::Role::vector, 0, 1, thread_memory(), nullptr);
    launch.call_.kernels->foresee(alone);
    for (Launch::Kernel* kernel : {&launch.comm_, &launch.compute_}) {
        for (Launch::Part& part : kernel->parts) {
            part.records.resize(part.blocks);
            for (std::uint32_t i = 0; i < part.blocks; ++i) launch.run_block(part, i);
        }
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
        launch->environment_.pad.abort(transport::AbortCode::cancelled,
                                       {.waiter = transport::Waiter::host,
                                        .peer = launch->environment_.rank,
                                        .chunk = sim::kNoChunk,
                                        .op = launch->environment_.op});
    }
}

std::string Launch::trace() const {
    if (!call_.trace) return {};
    std::string blob;
    const auto append = [&blob](const auto* data, std::size_t count) {
        blob.append(reinterpret_cast<const char*>(data), count * sizeof(*data));
    };
    const sim::TraceHeader header{.rank = call_.args.rank,
                                  .world = call_.kernels->world(),
                                  .node = call_.node,
                                  .cores = comm_.blocks() + compute_.blocks(),
                                  .compute_first = call_.kernels->compute_first() ? 1U : 0U};
    append(&header, 1);
    for (const Kernel* kernel : {&comm_, &compute_}) {
        for (const Part& part : kernel->parts) {
            for (std::uint32_t i = 0; i < part.blocks; ++i) {
                const auto& records = part.records[i];
                const sim::TraceCore core{part.role, part.first + i, records.size()};
                append(&core, 1);
                append(records.data(), records.size());
            }
        }
    }
    return blob;
}

}  // namespace mkernel::ascend::host
