// The command FIFO with a GPU that pushes to it: checks, and figures. tests/gpu runs it.
//
//   fifo_on_gpu check          prints {"check": true or why not, ...} as JSON; 1 where one does not hold
//   fifo_on_gpu check FAULT    the same with a planted fault (kFaults), which the check named there must
//                              catch: 0 where that one, and only that one, does not hold
//   fifo_on_gpu bench          prints figures as JSON
//   fifo_on_gpu faults         prints the names of the faults, one a line
//
// Every wait, of host and device, has a deadline.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/device_fifo.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/nics/proxy.hpp"
#include "tests/native/cuda/fifo_kernels.hpp"
#include "tests/native/nics/counting_nic.hpp"
#include "tests/native/nics/pair.hpp"
#include "tests/native/nics/threads.hpp"

using namespace mkernel;
using namespace mkernel::testing;
using mkernel::cuda::check;
using mkernel::nics::testing::CountingNic;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kPatience = 20'000 * kMs;
constexpr std::uint32_t kSignals = 64;
constexpr std::uint32_t kWord = 2;  // the signal that tests use; no multiple of anything

struct NamedFault {
    const char* name;
    const char* caught_by;
    Fault fault;
    bool host = false;  // the host's side does it
};
constexpr NamedFault kFaults[] = {
    {"commit_before_payload", "commands_are_whole", Fault::commit_before_payload},
    {"tail_not_waited_for", "a_full_ring_waits", Fault::tail_not_waited_for},
    {"ticket_before_room", "giving_up_leaves_no_hole", Fault::ticket_before_room},
    {"abort_not_looked_at", "an_abort_ends_pushes", Fault::abort_not_looked_at},
    {"republish_before_word", "a_copy_comes_after_the_data", Fault::republish_before_word},
    {"raise_before_data", "a_copy_comes_after_the_data", Fault::none, true},
};

std::size_t pages(std::size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
}

// Zeroed memory, which the host reads by get().
template <class T>
class OnDevice {
  public:
    OnDevice() {
        void* memory = nullptr;
        check(cudaMalloc(&memory, sizeof(T)), "cudaMalloc");
        memory_ = static_cast<T*>(memory);
        check(cudaMemset(memory_, 0, sizeof(T)), "cudaMemset");
    }
    ~OnDevice() { cudaFree(memory_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    [[nodiscard]] T* at() const { return memory_; }
    [[nodiscard]] T get() const {
        T value;
        check(cudaMemcpy(&value, memory_, sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return value;
    }

  private:
    T* memory_ = nullptr;
};

// Zeroed host memory that the device reaches by the same address.
template <class T>
class Pinned {
  public:
    explicit Pinned(std::size_t count = 1) {
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped), "cudaHostAlloc");
        std::memset(memory, 0, count * sizeof(T));
        memory_ = static_cast<T*>(memory);
    }
    ~Pinned() { cudaFreeHost(memory_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    [[nodiscard]] T* at() const { return memory_; }
    [[nodiscard]] T load() const {
        return std::atomic_ref(*memory_).load(std::memory_order_acquire);
    }

  private:
    T* memory_ = nullptr;
};

class Stream {
  public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    [[nodiscard]] cudaStream_t get() const { return stream_; }
    [[nodiscard]] bool over() const {
        const cudaError_t found = cudaStreamQuery(stream_);
        if (found == cudaErrorNotReady) return false;
        check(found, "a kernel");
        return true;
    }

  private:
    cudaStream_t stream_ = nullptr;
};

template <class Held>
bool soon(const Held& held, std::uint64_t patience = kPatience) {
    const std::uint64_t deadline = monotonic_ns() + patience;
    while (!held()) {
        if (monotonic_ns() > deadline) return false;
        std::this_thread::yield();
    }
    return true;
}

void rest(double ms) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

// A pad that the device reads, and a FIFO that it pushes to. drain() adds a proxy and a NIC.
class Rig {
  public:
    explicit Rig(std::uint64_t slots)
        : memory_(pages(SignalPad::bytes(kSignals))),
          pages_(memory_.address(), memory_.bytes()),
          pad(SignalPad::format(memory_.data(), kSignals)),
          fifo(slots) {
        claim();
    }
    ~Rig() {
        pad.abort(transport::AbortCode::cancelled,
                  {});  // ends whatever a failed check left running
        soon([&] { return stream.over(); });
        proxy.reset();
    }
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    void claim() {
        device.reset();
        device.emplace(reinterpret_cast<std::uint64_t>(&fifo.handle()), 0);
    }
    void drain(std::function<bool(const transport::PutCommand&)> checked = {}) {
        nic = std::make_unique<CountingNic>(std::move(checked));
        proxy = std::make_unique<nics::Proxy>(*nic, fifo, pad, std::vector<int>{});
    }
    [[nodiscard]] transport::DeviceLimits limits(std::uint64_t timeout_ns = kPatience) const {
        return {&pad.abort_record().code, timeout_ns};
    }
    void push(std::uint32_t blocks, std::uint32_t threads, std::uint32_t each, Fault fault,
              std::uint64_t timeout_ns = kPatience) {
        push_numbered(device->handle(), limits(timeout_ns), blocks, threads, each, fault, ends.at(),
                      stream.get());
    }
    // The grid is over, and so many of its threads ended like this.
    [[nodiscard]] bool ended(std::uint32_t ok, std::uint32_t aborted, std::uint32_t timed_out) {
        if (!soon([&] { return stream.over(); })) return false;
        const Ends seen = ends.get();
        return seen.of[0] == ok && seen.of[1] == aborted && seen.of[2] == timed_out;
    }
    [[nodiscard]] transport::FifoTickets tickets() const {
        transport::FifoTickets seen;
        check(cudaMemcpy(&seen, device->handle().tickets, sizeof(seen), cudaMemcpyDeviceToHost),
              "cudaMemcpy of tickets");
        return seen;
    }

  private:
    nics::testing::Memory memory_;
    cuda::MappedPages pages_;

  public:
    SignalPad pad;
    transport::Fifo fifo;
    std::optional<cuda::DeviceFifo> device;
    std::unique_ptr<CountingNic> nic;
    std::unique_ptr<nics::Proxy> proxy;
    OnDevice<Ends> ends;
    Stream stream;
};

std::uint32_t multiprocessors() {
    return static_cast<std::uint32_t>(cuda::devices().at(0).multiprocessors);
}

// What a NIC must see of `producers` that push numbered commands: each whole, each producer's in order.
class Order {
  public:
    explicit Order(std::uint32_t producers) : next_(producers) {}
    bool operator()(const transport::PutCommand& command) {
        if (command.region >= next_.size()) return false;
        const transport::PutCommand wanted = numbered(command.region, next_[command.region]++);
        return std::memcmp(&command, &wanted, sizeof(wanted)) == 0;
    }

  private:
    std::vector<std::uint64_t> next_;
};

// ---- checks: empty where they hold, else what was seen.

std::string over_many_laps(std::uint64_t slots, std::uint32_t blocks, std::uint32_t threads,
                           std::uint32_t each, Fault fault) {
    const std::uint32_t producers = blocks * threads;
    Rig rig(slots);
    rig.drain([order = std::make_shared<Order>(producers)](const transport::PutCommand& command) {
        return (*order)(command);
    });
    rig.push(blocks, threads, each, fault);
    const std::uint64_t all = std::uint64_t{producers} * each;
    const bool ended = rig.ended(producers, 0, 0);
    const bool flushed = rig.proxy->flush(monotonic_ns() + kPatience);
    if (ended && flushed && rig.nic->taken() == all && rig.nic->wrong() == 0 &&
        rig.fifo.depth() == 0) {
        return {};
    }
    return std::to_string(rig.nic->taken()) + " of " + std::to_string(all) + " commands came, " +
           std::to_string(rig.nic->wrong()) + " torn or out of order; grid " +
           (ended ? "ended" : "failed") + ", flush " + (flushed ? "ended" : "failed");
}

// One producer, in the ring's first lap and later ones.
std::string commands_are_whole(const NamedFault& planted) {
    const bool mine = planted.fault == Fault::commit_before_payload;
    return over_many_laps(4, 1, 1, 64, mine ? planted.fault : Fault::none);
}

std::string all_multiprocessors_push(const NamedFault&) {
    for (const std::uint64_t slots : {2u, 16u, 1024u}) {
        const std::string wrong = over_many_laps(slots, multiprocessors(), 64, 40, Fault::none);
        if (!wrong.empty()) return std::to_string(slots) + " slots: " + wrong;
    }
    return {};
}

std::string a_full_ring_waits(const NamedFault& planted) {
    Rig rig(4);
    transport::FifoRing& ring = rig.fifo.device();
    rig.push(1, 1, 6, planted.fault == Fault::tail_not_waited_for ? planted.fault : Fault::none);
    soon([&] { return ring.published() == 4 || rig.stream.over(); });
    rest(30);
    if (rig.stream.over() || ring.published() != 4) {
        return "a ring of 4 took a fifth command";
    }
    for (std::uint64_t number = 0; number < 6; ++number) {
        transport::PutCommand got;
        if (!soon([&] { return ring.pop(got); })) return "a command is lost";
        const transport::PutCommand wanted = numbered(0, number);
        if (std::memcmp(&got, &wanted, sizeof(got)) != 0) return "a command is wrong";
        rig.fifo.release();
    }
    return rig.ended(1, 0, 0) ? "" : "the grid failed";
}

// Eight threads, four slots, nobody drains: one times out, and that ends the others.
std::string giving_up_leaves_no_hole(const NamedFault& planted) {
    Rig rig(4);
    transport::FifoRing& ring = rig.fifo.device();
    constexpr std::uint64_t kDeadline = 20 * kMs;
    const std::uint64_t start = monotonic_ns();
    rig.push(8, 1, 1, planted.fault == Fault::ticket_before_room ? planted.fault : Fault::none,
             kDeadline);
    const bool ended = rig.ended(4, 3, 1);
    const std::uint64_t taken = monotonic_ns() - start;
    if (taken < kDeadline) return "the pushes gave up before their deadline";
    const std::uint64_t head = rig.tickets().head;
    if (head != 4) return std::to_string(head) + " tickets were taken of a ring of 4";
    if (!ended) return "the pushes ended otherwise than 4 ok, 3 aborted, 1 timed out";
    // Another claim goes on where the ring stands: two drained, two still in it.
    transport::PutCommand got;
    if (!ring.pop(got) || !ring.pop(got)) return "a command is lost";
    rig.fifo.release();
    rig.claim();
    rig.push(1, 1, 2, Fault::none);
    for (int left = 0; left < 4; ++left) {
        if (!soon([&] { return ring.pop(got); })) return "a command is lost behind another claim";
        rig.fifo.release();
    }
    return soon([&] { return rig.stream.over(); }) ? "" : "the grid did not end";
}

std::string an_abort_ends_pushes(const NamedFault& planted) {
    Rig rig(4);
    rig.push(4, 32, 1, planted.fault == Fault::abort_not_looked_at ? planted.fault : Fault::none,
             2'000 * kMs);
    if (!soon([&] { return rig.fifo.device().published() == 4; })) return "nothing was pushed";
    rest(5);
    rig.pad.abort(transport::AbortCode::peer_failure, {});
    if (!rig.ended(4, 4 * 32 - 4, 0)) return "the pushes did not end by the abort";
    return {};
}

// The host raises a word after it wrote a payload; blocks of a grid see the copy, then read the payload.
std::string a_copy_comes_after_the_data(const NamedFault& planted) {
    Rig rig(4);
    constexpr std::uint32_t kRounds = 200;
    const bool early = planted.host;
    const bool ahead = planted.fault == Fault::republish_before_word;
    const std::uint32_t rounds = early || ahead ? 3 : kRounds;
    OnDevice<transport::ExpectedCount> expected;
    OnDevice<transport::SetWord> copy;
    OnDevice<Arrivals> arrived;
    OnDevice<std::uint32_t> wrong;
    Pinned<std::uint64_t> payload;
    Pinned<std::uint64_t> acknowledged;
    Pinned<std::uint64_t> started;
    Watch what;
    what.run = {rig.pad.word(kWord), expected.at(), copy.at(), 1};
    what.payload = payload.at();
    what.rounds = rounds;
    what.blocks = multiprocessors();
    what.arrived = arrived.at();
    what.wrong = wrong.at();
    what.acknowledged = acknowledged.at();
    what.started = started.at();
    what.ends = rig.ends.at();
    watch(rig.limits(5'000 * kMs), what, ahead ? Fault::republish_before_word : Fault::none,
          rig.stream.get());
    if (!soon([&] { return started.load() == 1; })) return "the grid did not start";
    for (std::uint64_t round = 1; round <= rounds; ++round) {
        const auto seen = [&] { return acknowledged.load() >= round; };
        if (early) rig.pad.add(kWord, 1);
        if (early || ahead) soon(seen, 1'000 * kMs);  // the grid is ahead of the data for certain
        *payload.at() = round;
        if (!early) rig.pad.add(kWord, 1);
        if (!soon(seen)) return "round " + std::to_string(round) + " was not seen";
    }
    const bool ended = rig.ended(what.blocks, 0, 0);
    if (wrong.get() != 0) {
        return std::to_string(wrong.get()) + " blocks saw a word before the data behind it";
    }
    return ended ? "" : "the grid failed";
}

struct NamedCheck {
    const char* name;
    std::string (*body)(const NamedFault&);
};
constexpr NamedCheck kChecks[] = {
    {"commands_are_whole", commands_are_whole},
    {"all_multiprocessors_push", all_multiprocessors_push},
    {"a_full_ring_waits", a_full_ring_waits},
    {"giving_up_leaves_no_hole", giving_up_leaves_no_hole},
    {"an_abort_ends_pushes", an_abort_ends_pushes},
    {"a_copy_comes_after_the_data", a_copy_comes_after_the_data},
};

int run_checks(const NamedFault& planted) {
    bool good = true;
    std::printf("{");
    for (const NamedCheck& each : kChecks) {
        const std::string wrong = each.body(planted);
        const bool should =
            planted.caught_by == nullptr || std::strcmp(each.name, planted.caught_by) != 0;
        good = good && wrong.empty() == should;
        std::printf("%s\"%s\": %s%s%s", &each == kChecks ? "" : ", ", each.name,
                    wrong.empty() ? "true" : "\"", wrong.c_str(), wrong.empty() ? "" : "\"");
        std::fflush(stdout);
    }
    std::printf("}\n");
    return good ? 0 : 1;
}

// ---- figures

double at(const std::vector<double>& sorted, double share) {
    return sorted[std::min(sorted.size() - 1,
                           static_cast<std::size_t>(share * static_cast<double>(sorted.size())))];
}

std::string spread(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    char text[160];
    std::snprintf(text, sizeof(text),
                  "{\"min\": %.2f, \"p10\": %.2f, \"median\": %.2f, \"p90\": %.2f, \"p99\": %.2f, "
                  "\"max\": %.2f}",
                  values.front(), at(values, 0.1), at(values, 0.5), at(values, 0.9),
                  at(values, 0.99), values.back());
    return text;
}

// Commands a second that the NIC takes, from blocks x threads producers.
double command_rate(std::uint32_t blocks, std::uint32_t threads) {
    const std::uint32_t each = std::max(1u, 1'000'000 / (blocks * threads));
    const std::uint64_t all = std::uint64_t{blocks} * threads * each;
    Rig rig(1024);
    rig.drain();
    rig.push(1, 1, 1, Fault::none);  // loads the kernel
    if (!rig.proxy->flush(monotonic_ns() + kPatience)) throw std::runtime_error("no flush");
    soon([&] { return rig.nic->taken() == 1; });
    const std::uint64_t start = monotonic_ns();
    rig.push(blocks, threads, each, Fault::none);
    if (!soon([&] { return rig.nic->taken() == all + 1; })) {
        throw std::runtime_error("commands were lost");
    }
    return static_cast<double>(all) * 1e9 / static_cast<double>(monotonic_ns() - start);
}

transport::PutCommand echoed() {
    transport::PutCommand command;
    command.signal = kWord;
    command.value = 1;
    return command;
}

// Microseconds from the start of a push to the sight of the word that it makes the proxy raise.
std::vector<double> trips_us(bool republished) {
    constexpr std::uint32_t kRounds = 20'000;
    constexpr std::uint32_t kWarm = 1'000;
    Rig rig(1024);
    rig.drain();
    OnDevice<transport::ExpectedCount> expected;
    OnDevice<transport::SetWord> copy;
    Pinned<std::uint32_t> ticks(kRounds);
    Pinned<std::uint64_t> totals(2);
    round_trips(rig.device->handle(), rig.limits(),
                {echoed(),
                 {rig.pad.word(kWord), expected.at(), republished ? copy.at() : nullptr, 1},
                 kRounds,
                 ticks.at(),
                 totals.at(),
                 rig.ends.at()},
                rig.stream.get());
    if (!rig.ended(republished ? 2 : 1, 0, 0)) throw std::runtime_error("a round trip failed");
    const double us_a_tick =
        static_cast<double>(totals.at()[0]) / 1e3 / static_cast<double>(totals.at()[1]);
    std::vector<double> trips;
    for (std::uint32_t i = kWarm; i < kRounds; ++i) trips.push_back(ticks.at()[i] * us_a_tick);
    return trips;
}

// The same of the first push after a pause, by a replayed graph: nothing tells the proxy.
std::vector<double> wakes_us(double pause_ms) {
    constexpr int kReplays = 200;
    Rig rig(1024);
    rig.drain();
    Pinned<std::uint32_t> ticks(1);
    Pinned<std::uint64_t> totals(2);
    const RoundTrips trip = {echoed(),    {rig.pad.word(kWord), nullptr, nullptr, 1},
                             1,           ticks.at(),
                             totals.at(), rig.ends.at()};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check(cudaStreamBeginCapture(rig.stream.get(), cudaStreamCaptureModeThreadLocal), "a capture");
    round_trips(rig.device->handle(), rig.limits(), trip, rig.stream.get());
    check(cudaStreamEndCapture(rig.stream.get(), &graph), "the end of a capture");
    check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    std::vector<double> wakes;
    for (int i = 0; i < kReplays; ++i) {
        rest(pause_ms + 0.037 * (i % 10));  // no multiple of a nap
        check(cudaGraphLaunch(replay, rig.stream.get()), "cudaGraphLaunch");
        if (!soon([&] { return rig.stream.over(); })) throw std::runtime_error("no replay ended");
        wakes.push_back(static_cast<double>(totals.at()[0]) / 1e3);
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    if (!rig.ended(kReplays, 0, 0)) throw std::runtime_error("a replay failed");
    return wakes;
}

struct Idle {
    double share;
    double sleeps_a_second;
};

Idle idle(bool claimed) {
    Rig rig(1024);
    if (!claimed) rig.device.reset();
    rig.drain();
    const nics::testing::NamedThread proxy("mkernel-proxy");
    rest(500);  // naps find their length
    const double cpu = proxy.cpu_s();
    const std::uint64_t sleeps = proxy.sleeps();
    const std::uint64_t start = monotonic_ns();
    rest(2000);
    const double wall = static_cast<double>(monotonic_ns() - start) / 1e9;
    return {(proxy.cpu_s() - cpu) / wall, static_cast<double>(proxy.sleeps() - sleeps) / wall};
}

int run_figures() {
    const std::uint32_t blocks = multiprocessors();
    std::printf("{\"device\": \"%s\", \"multiprocessors\": %u, \"commands_per_s\": {",
                cuda::devices().at(0).name.c_str(), blocks);
    const char* comma = "";
    for (const std::uint32_t threads : {1u, 4u, 32u, 128u, 1024u}) {
        std::printf("%s\"%u_threads_a_multiprocessor\": %.0f", comma, threads,
                    command_rate(blocks, threads));
        std::fflush(stdout);
        comma = ", ";
    }
    std::printf(", \"one_warp\": %.0f, \"one_thread\": %.0f}", command_rate(1, 32),
                command_rate(1, 1));
    std::printf(", \"round_trip_us\": {\"republished\": %s", spread(trips_us(true)).c_str());
    std::printf(", \"polled_over_pcie\": %s}", spread(trips_us(false)).c_str());
    std::printf(", \"replay_after_idle_us\": {\"5_ms\": %s", spread(wakes_us(5)).c_str());
    std::printf(", \"30_ms\": %s}", spread(wakes_us(30)).c_str());
    const Idle claimed = idle(true);
    const Idle alone = idle(false);
    std::printf(
        ", \"idle_proxy\": {\"share_of_a_core\": %.4f, \"sleeps_a_second\": %.0f, "
        "\"share_without_device\": %.4f, \"sleeps_a_second_without_device\": %.0f}}\n",
        claimed.share, claimed.sleeps_a_second, alone.share, alone.sleeps_a_second);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    try {
        if (mode == "faults") {
            for (const NamedFault& each : kFaults) std::printf("%s\n", each.name);
            return 0;
        }
        if (mode == "check" && argc == 2) return run_checks({nullptr, nullptr, Fault::none});
        if (mode == "check" && argc == 3) {
            for (const NamedFault& each : kFaults) {
                if (std::strcmp(each.name, argv[2]) == 0) return run_checks(each);
            }
        }
        if (mode == "bench" && argc == 2) return run_figures();
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 1;
    }
    return std::fprintf(stderr, "usage: fifo_on_gpu check [FAULT] | bench | faults\n"), 2;
}
