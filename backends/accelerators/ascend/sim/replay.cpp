#include "backends/accelerators/ascend/sim/replay.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace mkernel::ascend::sim {

using isa::Pipe;

namespace {

// Reads plain structs from a blob, refusing to read beyond its end.
class BlobReader {
  public:
    explicit BlobReader(const std::string& blob) : blob_(blob) {}

    template <class T>
    T take() {
        T value;
        copy(&value, sizeof(T));
        return value;
    }
    template <class T>
    std::vector<T> take(std::uint64_t count) {
        if (count > (blob_.size() - at_) / sizeof(T)) truncated();
        std::vector<T> values(count);
        if (count > 0) copy(values.data(), count * sizeof(T));
        return values;
    }

  private:
    void copy(void* to, std::size_t bytes) {
        if (bytes > blob_.size() - at_) truncated();
        std::memcpy(to, blob_.data() + at_, bytes);
        at_ += bytes;
    }
    [[noreturn]] static void truncated() { throw ReplayError("a trace is cut short"); }

    const std::string& blob_;
    std::size_t at_ = 0;
};

struct Resource {
    double free_ns = 0;
    // Occupies the resource for `bytes` from `start` on; returns when they are through.
    double take(double start, double bytes, double rate) {
        free_ns = std::max(free_ns, start) + bytes / rate;
        return free_ns;
    }
};

struct Issued {
    const Record* record;
    double at_ns;
};

// One pipe other than S.
struct PipeState {
    std::deque<Issued> queue;
    double free_ns = 0;   // may start the next instruction
    double done_ns = 0;   // everything before is done
    bool queued = false;  // an event for its head is in the event queue
};

struct CoreState {
    std::uint32_t rank = 0, index = 0;
    Role role = Role::cube;
    std::vector<Record> records;
    std::size_t next = 0;  // of S
    double scalar_ns = 0;  // S's clock
    bool started = false;
    bool scalar_queued = false;  // an event for S's next signal instruction is in the event queue
    bool parked = false;         // S waits for a signal
    double parked_ns = 0;
    PipeState pipes[isa::kPipes];
    std::deque<double> flags[isa::kPipes][isa::kPipes][isa::kEvents];  // set, not yet waited for

    [[nodiscard]] bool drained() const {
        return std::all_of(std::begin(pipes), std::end(pipes),
                           [](const PipeState& pipe) { return pipe.queue.empty(); });
    }
    [[nodiscard]] double done_ns() const {
        double done = scalar_ns;
        for (const PipeState& pipe : pipes) done = std::max(done, pipe.done_ns);
        return done;
    }
    [[nodiscard]] bool complete() const { return next == records.size() && drained(); }
};

struct Signal {
    std::uint64_t value = 0;
    std::uint64_t own = 0;  // compute-only: the value that the compute kernel brings it to itself
    std::vector<std::size_t> waiting;  // cores
};

struct RankState {
    std::uint32_t node = 0;
    Resource memory, hbm, egress, ingress;
    std::unordered_set<std::uint32_t> in_l2;  // pieces of inputs
    std::unordered_map<std::uint32_t, Signal> signals;

    Signal& signal(std::uint32_t index) { return signals[index]; }
};

struct Event {
    enum class What : std::uint8_t { scalar, pipe, raise };
    What what = What::scalar;
    std::size_t core = 0;      // scalar, pipe
    std::uint32_t pipe = 0;    // pipe
    std::uint32_t rank = 0;    // raise
    std::uint32_t signal = 0;  // raise
    std::uint64_t value = 0;   // raise
    double at_ns = 0;
    std::uint64_t order = 0;  // ties: first scheduled, first served

    bool operator>(const Event& other) const {
        return std::tie(at_ns, order) > std::tie(other.at_ns, other.order);
    }
};

class Simulation {
  public:
    Simulation(const std::vector<std::string>& traces, const Machine& machine, View view,
               bool keep_spans)
        : machine_(machine), view_(view), keep_spans_(keep_spans) {
        read(traces);
    }

    Replay run() {
        if (view_ == View::sequential) {
            start(compute_first_ ? KernelName::compute : KernelName::comm, machine_.launch_ns);
            settle();
            start(compute_first_ ? KernelName::comm : KernelName::compute,
                  last_ns_ + machine_.launch_ns);
        } else {
            if (view_ == View::compute_only) count_own_signals();
            if (view_ == View::pipelined) start(KernelName::comm, machine_.launch_ns);
            start(KernelName::compute, machine_.launch_ns);
        }
        settle();
        for (const CoreState& core : cores_) {
            if (!core.started) continue;
            const KernelName kernel = kernel_of(core.role);
            auto found = std::find_if(
                result_.kernels.begin(), result_.kernels.end(),
                [&](const KernelTime& k) { return k.rank == core.rank && k.kernel == kernel; });
            if (found == result_.kernels.end()) {
                const double start = start_ns_[static_cast<int>(kernel)];
                result_.kernels.push_back({core.rank, kernel, start, 0});
                found = result_.kernels.end() - 1;
            }
            found->end_ns = std::max(found->end_ns, core.done_ns());
            result_.total_ns = std::max(result_.total_ns, core.done_ns());
        }
        return std::move(result_);
    }

  private:
    void read(const std::vector<std::string>& traces) {
        ranks_.resize(traces.size());
        std::vector<bool> seen(traces.size(), false);
        for (const std::string& blob : traces) {
            BlobReader reader(blob);
            const auto header = reader.take<TraceHeader>();
            if (header.magic != TraceHeader::kMagic) {
                throw ReplayError("not a trace of the ascend backend");
            }
            if (header.world != traces.size() || header.rank >= header.world || seen[header.rank]) {
                throw ReplayError("traces of every rank of one world are needed, each once: rank " +
                                  std::to_string(header.rank) + " of " +
                                  std::to_string(header.world) + " among " +
                                  std::to_string(traces.size()) + " traces");
            }
            seen[header.rank] = true;
            compute_first_ = header.compute_first != 0;
            RankState& rank = ranks_[header.rank];
            rank.node = header.node;
            for (std::uint32_t i = 0; i < header.cores; ++i) {
                const auto head = reader.take<TraceCore>();
                CoreState& core = cores_.emplace_back();
                core.rank = header.rank;
                if (static_cast<int>(head.role) >= kRoles) {
                    throw ReplayError("a trace holds an unknown kind of core");
                }
                core.role = head.role;
                core.index = head.index;
                core.records = reader.take<Record>(head.records);
                for (const Record& record : core.records) check(record);
            }
        }
        // Sorted, so that the order of cores, which decides ties, is the same for any order of the blobs.
        std::sort(cores_.begin(), cores_.end(), [](const CoreState& a, const CoreState& b) {
            return std::tie(a.rank, a.role, a.index) < std::tie(b.rank, b.role, b.index);
        });
    }

    void check(const Record& record) const {
        const bool sound = static_cast<int>(record.kind) < kKinds &&
                           static_cast<int>(record.pipe) < isa::kPipes &&
                           static_cast<int>(record.other) < isa::kPipes &&
                           record.event < isa::kEvents && record.peer < ranks_.size();
        if (!sound) throw ReplayError("a trace holds an unknown instruction");
    }

    // Counts, in the compute-only view, the signals of the compute kernels to their own rank.
    void count_own_signals() {
        for (const CoreState& core : cores_) {
            if (kernel_of(core.role) != KernelName::compute) continue;
            for (const Record& record : core.records) {
                if (record.kind != Kind::tnotify || record.peer != core.rank) continue;
                ranks_[core.rank].signal(record.signal).own += record.amount;
            }
        }
    }

    // Returns true, in the compute-only view, for signals that other ranks or the comm kernel would raise,
    // which count as present. Signals between the two parts of the compute kernel stay.
    [[nodiscard]] bool left_out(const CoreState& core, const Record& record) {
        if (view_ != View::compute_only) return false;
        if (record.kind != Kind::twait) return record.peer != core.rank;
        return ranks_[core.rank].signal(record.signal).own < record.amount;
    }

    void start(KernelName kernel, double at_ns) {
        start_ns_[static_cast<int>(kernel)] = at_ns;
        for (std::size_t i = 0; i < cores_.size(); ++i) {
            if (kernel_of(cores_[i].role) != kernel) continue;
            cores_[i].started = true;
            cores_[i].scalar_ns = at_ns;
            for (PipeState& pipe : cores_[i].pipes) pipe.free_ns = pipe.done_ns = at_ns;
        }
        for (std::size_t i = 0; i < cores_.size(); ++i) {
            if (kernel_of(cores_[i].role) == kernel) advance(i);
        }
    }

    // Runs until nothing can happen any more; throws if a started core is not complete then.
    void settle() {
        while (!events_.empty()) {
            const Event event = events_.top();
            events_.pop();
            now_ns_ = event.at_ns;
            last_ns_ = std::max(last_ns_, event.at_ns);
            switch (event.what) {
                case Event::What::raise:
                    raise(event);
                    break;
                case Event::What::scalar:
                    cores_[event.core].scalar_queued = false;
                    signal_instruction(event.core);
                    advance(event.core);
                    break;
                case Event::What::pipe:
                    cores_[event.core].pipes[event.pipe].queued = false;
                    transfer(event.core, event.pipe);
                    advance(event.core);
                    break;
            }
        }
        const CoreState* cause = nullptr;
        for (const CoreState& core : cores_) {
            if (!core.started) continue;
            last_ns_ = std::max(last_ns_, core.done_ns());
            if (core.complete()) continue;
            // A core that waits for others of its own rank is a consequence of what holds up those.
            const bool own = core.parked && core.records[core.next].peer == core.rank;
            if (cause == nullptr || !own) cause = &core;
            if (!own) break;
        }
        if (cause != nullptr) throw ReplayError(stuck(*cause));
    }

    void schedule(double at_ns, Event event) {
        event.at_ns = at_ns;
        event.order = order_++;
        events_.push(event);
    }

    // Executes everything of a core that needs no order relative to other cores, as far as it goes.
    void advance(std::size_t which) {
        bool progress = true;
        while (progress) {
            progress = scalar(which);
            for (std::uint32_t pipe = 1; pipe < isa::kPipes; ++pipe) {
                while (step(which, pipe)) progress = true;
            }
        }
    }

    // Issues S's instructions until it meets a signal, a fence that is not drained, or the end.
    bool scalar(std::size_t which) {
        CoreState& core = cores_[which];
        bool progress = false;
        while (!core.parked && !core.scalar_queued && core.next < core.records.size()) {
            const Record& record = core.records[core.next];
            switch (record.kind) {
                case Kind::tnotify:
                case Kind::twait:
                case Kind::nic_put:
                    if (left_out(core, record)) {
                        ++core.next;
                        break;
                    }
                    core.scalar_queued = true;
                    schedule(core.scalar_ns, {.what = Event::What::scalar, .core = which});
                    return true;
                case Kind::scalar: {
                    const double took = static_cast<double>(record.amount) / sizeof(std::int32_t) *
                                        machine_.scalar_ns;
                    keep(core, record, core.scalar_ns, took);
                    core.scalar_ns += took;
                    ++core.next;
                    break;
                }
                case Kind::fence: {
                    const PipeState& pipe = core.pipes[static_cast<int>(record.pipe)];
                    const bool all = record.pipe == Pipe::S;
                    if (all ? !core.drained() : !pipe.queue.empty()) return progress;
                    const double done =
                        all ? core.done_ns() : std::max(core.scalar_ns, pipe.done_ns);
                    core.scalar_ns = done + machine_.issue_ns;
                    ++core.next;
                    break;
                }
                case Kind::set_flag:
                case Kind::wait_flag:
                    if (record.kind == Kind::set_flag && record.pipe == Pipe::S) {
                        flag(core, record).push_back(core.scalar_ns);
                        ++core.next;
                        break;
                    }
                    if (record.kind == Kind::wait_flag && record.other == Pipe::S) {
                        auto& set = flag(core, record);
                        if (set.empty()) return progress;
                        core.scalar_ns = std::max(core.scalar_ns, set.front());
                        set.pop_front();
                        ++core.next;
                        break;
                    }
                    [[fallthrough]];
                default: {
                    const Pipe pipe = record.kind == Kind::wait_flag ? record.other : record.pipe;
                    core.scalar_ns += machine_.issue_ns;
                    core.pipes[static_cast<int>(pipe)].queue.push_back({&record, core.scalar_ns});
                    ++core.next;
                }
            }
            progress = true;
        }
        return progress;
    }

    // Executes one instruction of a pipe. Returns false if there is none, it is held, or it waits for its
    // event.
    bool step(std::size_t which, std::uint32_t pipe_index) {
        CoreState& core = cores_[which];
        PipeState& pipe = core.pipes[pipe_index];
        if (pipe.queue.empty() || pipe.queued) return false;
        const Issued head = pipe.queue.front();
        const Record& record = *head.record;
        const double start = std::max(pipe.free_ns, head.at_ns);
        switch (record.kind) {
            case Kind::set_flag:
                flag(core, record).push_back(std::max(pipe.done_ns, head.at_ns));
                break;
            case Kind::wait_flag: {
                auto& set = flag(core, record);
                if (set.empty()) return false;
                pipe.free_ns = std::max(start, set.front());
                set.pop_front();
                break;
            }
            case Kind::textract:
                occupy(core, pipe, record, start,
                       start + static_cast<double>(record.amount) / machine_.extract_rate,
                       machine_.extract_ns);
                break;
            case Kind::tmatmul:
            case Kind::tmatmul_acc: {
                const double rate =
                    record.width == 4 ? machine_.macs_per_ns_32 : machine_.macs_per_ns_16;
                occupy(core, pipe, record, start,
                       start + machine_.matmul_ns + static_cast<double>(record.amount) / rate, 0);
                break;
            }
            default:
                if (record.pipe == Pipe::V) {
                    occupy(core, pipe, record, start,
                           start + static_cast<double>(record.amount) / machine_.vector_rate, 0);
                    break;
                }
                // shares memory or links with others: in global order of start
                pipe.queued = true;
                schedule(start, {.what = Event::What::pipe, .core = which, .pipe = pipe_index});
                return false;
        }
        pipe.queue.pop_front();
        return true;
    }

    static std::deque<double>& flag(CoreState& core, const Record& record) {
        return core
            .flags[static_cast<int>(record.pipe)][static_cast<int>(record.other)][record.event];
    }

    void occupy(CoreState& core, PipeState& pipe, const Record& record, double start, double end,
                double latency) {
        pipe.free_ns = end;
        pipe.done_ns = std::max(pipe.done_ns, end + latency);
        keep(core, record, start, end - start);
    }

    // Executes the head of a pipe that moves bytes, at its turn.
    void transfer(std::size_t which, std::uint32_t pipe_index) {
        CoreState& core = cores_[which];
        PipeState& pipe = core.pipes[pipe_index];
        const Record& record = *pipe.queue.front().record;
        const double start = now_ns_;
        const auto bytes = static_cast<double>(record.amount);
        RankState& rank = ranks_[core.rank];
        double rate = machine_.load_rate;
        double latency = machine_.memory_ns;
        double end = rank.memory.take(start, bytes, machine_.memory_rate);
        if (record.signal != 0 && rank.in_l2.insert(record.signal).second) {
            end = std::max(end, rank.hbm.take(start, bytes, machine_.hbm_rate));
        }
        if (record.kind == Kind::tstore) rate = machine_.store_rate;
        if (record.kind == Kind::tput || record.kind == Kind::tget) {
            rate = machine_.put_rate;
            RankState& peer = ranks_[record.peer];
            end = std::max(end, peer.memory.take(start, bytes, machine_.memory_rate));
            if (record.peer != core.rank) {
                const bool gets = record.kind == Kind::tget;
                const std::uint32_t from = gets ? record.peer : core.rank;
                const std::uint32_t to = gets ? core.rank : record.peer;
                latency = (gets ? 2 : 1) * machine_.link_ns;
                end = std::max(end, links_[{from, to}].take(start, bytes, machine_.link_rate));
                end = std::max(end, ranks_[from].egress.take(start, bytes, machine_.egress_rate));
                end = std::max(end, ranks_[to].ingress.take(start, bytes, machine_.ingress_rate));
            }
        }
        occupy(core, pipe, record, start, std::max(end, start + bytes / rate), latency);
        pipe.queue.pop_front();
    }

    void signal_instruction(std::size_t which) {
        CoreState& core = cores_[which];
        const Record& record = core.records[core.next];
        core.scalar_ns = std::max(core.scalar_ns, now_ns_);
        if (record.kind == Kind::twait) {
            Signal& signal = ranks_[core.rank].signal(record.signal);
            if (!core.parked) core.parked_ns = core.scalar_ns;
            core.parked = signal.value < record.amount;
            if (core.parked) {
                signal.waiting.push_back(which);
                return;
            }
            keep(core, record, core.parked_ns, core.scalar_ns - core.parked_ns);
        } else if (record.kind == Kind::tnotify) {
            const double latency = record.peer == core.rank ? 0 : machine_.signal_ns;
            schedule(core.scalar_ns + latency, {.what = Event::What::raise,
                                                .rank = record.peer,
                                                .signal = record.signal,
                                                .value = record.amount});
            keep(core, record, core.scalar_ns, machine_.issue_ns);
        } else {
            const std::uint32_t from = ranks_[core.rank].node, to = ranks_[record.peer].node;
            const double start = core.scalar_ns + machine_.proxy_ns;
            const auto bytes = static_cast<double>(record.amount);
            const double sent = nic_out_[from].take(start, bytes, machine_.nic_rate);
            const double received = nic_in_[to].take(start, bytes, machine_.nic_rate);
            const double there = std::max(sent, received) + machine_.nic_ns;
            schedule(there, {.what = Event::What::raise,
                             .rank = record.peer,
                             .signal = record.signal,
                             .value = record.value});
            keep(core, record, core.scalar_ns, machine_.issue_ns);
        }
        core.scalar_ns += machine_.issue_ns;
        ++core.next;
    }

    void raise(const Event& event) {
        Signal& signal = ranks_[event.rank].signal(event.signal);
        signal.value += event.value;
        std::vector<std::size_t> woken;
        woken.swap(signal.waiting);
        for (const std::size_t which : woken) {
            signal_instruction(which);
            advance(which);
        }
    }

    void keep(const CoreState& core, const Record& record, double start, double duration) {
        if (!keep_spans_) return;
        result_.spans.push_back({.rank = core.rank,
                                 .role = core.role,
                                 .core = core.index,
                                 .kind = record.kind,
                                 .pipe = record.pipe,
                                 .chunk = record.chunk,
                                 .peer = record.peer,
                                 .start_ns = start,
                                 .duration_ns = duration});
    }

    std::string stuck(const CoreState& core) {
        std::string text = "the modelled schedule never ends: rank " + std::to_string(core.rank) +
                           " " + core_name(core.role, core.index);
        if (core.parked) {
            const Record& record = core.records[core.next];
            return text + " waits for signal " + std::to_string(record.signal) + " of rank " +
                   std::to_string(record.peer) +
                   (record.chunk == kNoChunk ? "" : ", chunk " + std::to_string(record.chunk)) +
                   ": stands at " + std::to_string(ranks_[core.rank].signal(record.signal).value) +
                   ", wanted " + std::to_string(record.amount);
        }
        for (std::uint32_t pipe = 1; pipe < isa::kPipes; ++pipe) {
            if (core.pipes[pipe].queue.empty()) continue;
            const Record& record = *core.pipes[pipe].queue.front().record;
            text += std::string("; pipe ") + name_of(static_cast<Pipe>(pipe)) + " at " +
                    name_of(record.kind);
            if (record.kind == Kind::wait_flag) {
                text += std::string(" ") + name_of(record.pipe) + "→" + name_of(record.other) +
                        " event " + std::to_string(record.event);
            }
        }
        return text;
    }

    const Machine& machine_;
    View view_;
    bool keep_spans_;
    std::vector<RankState> ranks_;
    std::vector<CoreState> cores_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, Resource> links_;
    std::map<std::uint32_t, Resource> nic_out_, nic_in_;  // by node
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::uint64_t order_ = 0;
    double now_ns_ = 0, last_ns_ = 0;
    double start_ns_[kKernels] = {0, 0};
    bool compute_first_ = false;
    Replay result_;
};

}  // namespace

Replay replay(const std::vector<std::string>& traces, const Machine& machine, View view,
              bool keep_spans) {
    if (traces.empty()) throw ReplayError("no traces");
    return Simulation(traces, machine, view, keep_spans).run();
}

}  // namespace mkernel::ascend::sim
