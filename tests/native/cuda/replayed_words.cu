// Words of both kinds under two plans that share them: eager launches and replayed graphs, in a random order
// that a seed gives. Two ranks, each a stream of its own, on one GPU or on two. tests/gpu runs it.
//
//   replayed_words check DEVICES          prints {"check": whether it held, ...} as JSON; 1 where one did not
//   replayed_words check DEVICES FAULT    the same with a planted fault (kFaults): 0 where the check that is
//                                         named there caught it
//   replayed_words faults                 prints the names of the faults, one a line
//
// In every call one of the ranks is late: it writes nothing before all blocks of the other one wait, and then
// still pauses. So a wait that is satisfied by an earlier call's words reads an earlier call's values, for
// certain. Every wait has a deadline.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/transport/device_wait.cuh"

using namespace mkernel::transport;
using mkernel::cuda::check;

namespace {

constexpr int kRanks = 2;
constexpr unsigned kBlocks = 4;
constexpr unsigned kThreads = 64;
constexpr unsigned kValues = kBlocks * kThreads;
constexpr unsigned kWords = 6;  // of each kind
constexpr std::uint64_t kPauseNs = 200'000;

enum class Fault {
    none,
    count_not_moved_on,
    count_moved_on_twice,
    set_goes_back,
    epoch_of_the_launch
};

struct NamedFault {
    const char* name;
    const char* caught_by;
    Fault fault;
};
constexpr NamedFault kFaults[] = {
    {"count_not_moved_on", "values", Fault::count_not_moved_on},
    {"count_moved_on_twice", "waits", Fault::count_moved_on_twice},
    {"set_goes_back", "waits", Fault::set_goes_back},
    {"epoch_of_the_launch", "values", Fault::epoch_of_the_launch},
};

// Which words of either kind a plan's calls use, and how often each block adds to an added one.
struct Plan {
    unsigned first;
    unsigned end;
    std::uint64_t each;
    __host__ __device__ std::uint64_t additions() const { return kBlocks * each; }
};
constexpr Plan kPlans[] = {{0, 4, 1}, {2, kWords, 3}};
const std::vector<int> kGraphs[] = {{0}, {1}, {1, 0, 0}};  // plans of a graph's calls

// A rank's, in memory of its device.
struct RankMemory {
    CallState state;
    unsigned wrong;  // values that were not the call's
    ExpectedCount expected[kWords];
    ExpectedCount expected_waiters;
    // The other rank writes these.
    AddedWord added[kWords];
    SetWord set[kWords];
    AddedWord waiters;  // blocks there that begin to wait
    SetWord finished;
    std::uint64_t added_values[kWords][kValues];
    std::uint64_t set_values[kWords][kValues];
};

struct CallArgs {
    RankMemory* own;
    RankMemory* peer;
    WaitLimits limits;
    Plan plan;
    std::uint64_t rank;
    std::uint64_t epoch_of_the_launch;
    Fault fault;
};

__device__ std::uint64_t value_of(std::uint64_t epoch, unsigned word, unsigned at) {
    return epoch * 1'000'003 + word * 4096 + at;
}

__device__ Awaited awaited(const CallArgs& args, std::uint32_t word) {
    return {word, static_cast<std::uint32_t>(1 - args.rank), kNoChunk};
}

__device__ void pause(std::uint64_t ns) {
    const std::uint64_t start = global_ns();
    while (global_ns() - start < ns) __nanosleep(1000);
}

// Whether thread 0 saw the word come. All threads of a block.
__device__ bool all_wait(const DeviceWaiter& waiter, const Word& word, std::uint64_t wanted,
                         Awaited what) {
    return __syncthreads_and(threadIdx.x != 0 || waiter.until(word, wanted, what)) != 0;
}

__device__ void produce(const CallArgs& args, std::uint64_t epoch, std::uint64_t to_set) {
    RankMemory& peer = *args.peer;
    for (unsigned word = args.plan.first; word < args.plan.end; ++word) {
        const unsigned at = blockIdx.x * kThreads + threadIdx.x;
        peer.added_values[word][at] = value_of(epoch, word, at);
        __syncthreads();
        if (threadIdx.x == 0) peer.added[word].add(args.plan.each);

        if (word % kBlocks != blockIdx.x) continue;  // a set word has one writer
        for (unsigned i = threadIdx.x; i < kValues; i += kThreads) {
            peer.set_values[word][i] = value_of(epoch, word, i);
        }
        __syncthreads();
        const bool back = args.fault == Fault::set_goes_back && epoch % 3 == 0;
        if (threadIdx.x == 0) peer.set[word].set(back ? to_set - 2 : to_set);
    }
}

// One kind a block, so that neither waits for the other.
__device__ void consume(const CallArgs& args, const DeviceWaiter& waiter, std::uint64_t epoch,
                        std::uint64_t to_set) {
    RankMemory& own = *args.own;
    const bool adds = blockIdx.x % 2 == 0;
    for (unsigned word = args.plan.first; word < args.plan.end; ++word) {
        const bool come =
            adds ? all_wait(waiter, own.added[word],
                            own.expected[word].after(args.plan.additions()), awaited(args, word))
                 : all_wait(waiter, own.set[word], to_set, awaited(args, word));
        if (!come) return;
        const std::uint64_t* values = adds ? own.added_values[word] : own.set_values[word];
        for (unsigned i = threadIdx.x; i < kValues; i += kThreads) {
            if (values[i] != value_of(epoch, word, i)) atomicAdd(&own.wrong, 1u);
        }
    }
}

// One thread of every block: as device/call.cuh of Hopper ends a call.
__device__ void finish(const CallArgs& args, const DeviceWaiter& waiter, std::uint64_t epoch) {
    RankMemory& own = *args.own;
    fence_system();
    if (!own.state.is_last_block()) return;
    fence_system();
    args.peer->finished.set_fenced(epoch);
    waiter.until(own.finished, epoch, awaited(args, kControlWord));
    int times = 1;
    if (args.fault == Fault::count_not_moved_on) times = 0;
    if (args.fault == Fault::count_moved_on_twice) times = 2;
    for (unsigned word = args.plan.first; word < args.plan.end; ++word) {
        for (int i = 0; i < times; ++i) own.expected[word].move_on(args.plan.additions());
    }
    own.expected_waiters.move_on(kBlocks);
    own.state.move_on(epoch);
}

__global__ void call_kernel(const CallArgs args) {
    RankMemory& own = *args.own;
    const DeviceWaiter waiter(own.state, args.limits, Waiter::compute_kernel);
    const std::uint64_t epoch = own.state.epoch;
    const std::uint64_t to_set =
        args.fault == Fault::epoch_of_the_launch ? args.epoch_of_the_launch : epoch;
    if (epoch % kRanks == args.rank) {
        all_wait(waiter, own.waiters, own.expected_waiters.after(kBlocks),
                 awaited(args, kControlWord));
        pause(kPauseNs);
    }
    produce(args, epoch, to_set);
    if (threadIdx.x == 0) args.peer->waiters.add(1);
    consume(args, waiter, epoch, to_set);
    __syncthreads();
    if (threadIdx.x == 0) finish(args, waiter, epoch);
}

class Rank {
  public:
    Rank(int rank, int device) : rank_(rank), device_(device) {
        check(cudaSetDevice(device_), "cudaSetDevice");
        // Loaded now: it might wait for the kernels that run already.
        cudaFuncAttributes loaded{};
        check(cudaFuncGetAttributes(&loaded, call_kernel), "loading call_kernel");
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
        check(cudaMalloc(&memory_, sizeof(RankMemory)), "cudaMalloc");
        check(cudaMemset(memory_, 0, sizeof(RankMemory)), "cudaMemset");
        const std::uint64_t first = 1;
        check(cudaMemcpy(&memory_->state.epoch, &first, sizeof(first), cudaMemcpyHostToDevice),
              "writing the first epoch");
        void* control = nullptr;
        check(cudaHostAlloc(&control, sizeof(HostControl),
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "cudaHostAlloc");
        control_ = new (control) HostControl{};
    }
    ~Rank() {
        cudaSetDevice(device_);
        for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
        cudaStreamDestroy(stream_);
        cudaFree(memory_);
        cudaFreeHost(control_);
    }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    // `epoch`: the number of the call as the host counts, which only a faulty call heeds.
    void launch(const Rank& peer, int plan, std::uint64_t epoch, std::uint64_t timeout_ns,
                Fault fault) {
        check(cudaSetDevice(device_), "cudaSetDevice");
        const CallArgs args{memory_,
                            peer.memory_,
                            {control_, timeout_ns, static_cast<std::uint32_t>(epoch)},
                            kPlans[plan],
                            static_cast<std::uint64_t>(rank_),
                            epoch,
                            fault};
        call_kernel<<<kBlocks, kThreads, 0, stream_>>>(args);
        check(cudaGetLastError(), "launching call_kernel");
    }

    void capture(const Rank& peer, const std::vector<int>& plans, std::uint64_t timeout_ns,
                 Fault fault) {
        check(cudaSetDevice(device_), "cudaSetDevice");
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing");
        std::uint64_t epoch = 1;
        for (const int plan : plans) launch(peer, plan, epoch++, timeout_ns, fault);
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(stream_, &graph), "capturing");
        cudaGraphExec_t made = nullptr;
        const cudaError_t status = cudaGraphInstantiate(&made, graph, 0);
        cudaGraphDestroy(graph);
        check(status, "cudaGraphInstantiate");
        graphs_.push_back(made);
    }

    void replay(std::size_t graph) {
        check(cudaSetDevice(device_), "cudaSetDevice");
        check(cudaGraphLaunch(graphs_[graph], stream_), "cudaGraphLaunch");
    }

    [[nodiscard]] bool idle() const {
        check(cudaSetDevice(device_), "cudaSetDevice");
        const cudaError_t status = cudaStreamQuery(stream_);
        if (status == cudaErrorNotReady) return false;
        check(status, "a call");
        return true;
    }

    void give_up() { store_release(&control_->abort, 4u); }

    [[nodiscard]] const AbortRecord& record() const { return control_->record; }

    [[nodiscard]] RankMemory read() const {
        RankMemory found;
        check(cudaMemcpy(&found, memory_, sizeof(found), cudaMemcpyDeviceToHost), "cudaMemcpy");
        return found;
    }

  private:
    int rank_;
    int device_;
    cudaStream_t stream_ = nullptr;
    RankMemory* memory_ = nullptr;
    HostControl* control_ = nullptr;
    std::vector<cudaGraphExec_t> graphs_;
};

struct Step {
    bool replay;
    int what;  // graph or plan
};

std::vector<Step> random_steps(int replays, int eager, std::mt19937& random) {
    std::vector<Step> steps;
    for (int i = 0; i < replays; ++i)
        steps.push_back({true, i % static_cast<int>(std::size(kGraphs))});
    for (int i = 0; i < eager; ++i)
        steps.push_back({false, i % static_cast<int>(std::size(kPlans))});
    std::shuffle(steps.begin(), steps.end(), random);
    return steps;
}

// Until all that was queued has ended, which it does by its own deadlines. False: it did not.
bool all_idle(std::vector<Rank*> ranks, std::chrono::seconds patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (!std::all_of(ranks.begin(), ranks.end(), [](Rank* rank) { return rank->idle(); })) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

struct Outcome {
    bool values = true;  // what was read was of the call
    bool waits = true;   // all ended well
    bool counts = true;  // words, expected counts and epochs stand where the plans say
    int replays = 0;
    int eager = 0;
    std::uint64_t calls = 0;
};

Outcome run(int devices, Fault fault) {
    std::mt19937 random(20);
    const std::uint64_t timeout_ns = fault == Fault::none ? 10'000'000'000u : 300'000'000u;
    Rank first(0, 0);
    Rank second(1, devices == 2 ? 1 : 0);
    const auto each = [&](auto&& body) {
        if (random() % 2 == 0) {
            body(first, second);
            body(second, first);
        } else {
            body(second, first);
            body(first, second);
        }
    };
    for (const auto& plans : kGraphs) {
        each([&](Rank& own, Rank& peer) { own.capture(peer, plans, timeout_ns, fault); });
    }

    Outcome outcome;
    std::uint64_t calls[std::size(kPlans)] = {};
    std::uint64_t latest[std::size(kPlans)] = {};  // number of a plan's latest call
    // A fault shows within the first few calls; the waits that fail for it take their time.
    const auto steps =
        fault == Fault::none ? random_steps(100, 100, random) : random_steps(9, 4, random);
    for (const Step& step : steps) {
        const auto plans = step.replay ? kGraphs[step.what] : std::vector<int>{step.what};
        if (random() % 8 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
        }
        each([&](Rank& own, Rank& peer) {
            if (step.replay) {
                own.replay(step.what);
            } else {
                own.launch(peer, step.what, outcome.calls + 1, timeout_ns, fault);
            }
        });
        for (const int plan : plans) {
            ++calls[plan];
            latest[plan] = ++outcome.calls;
        }
        ++(step.replay ? outcome.replays : outcome.eager);
    }
    if (!all_idle({&first, &second}, std::chrono::seconds(60))) {
        first.give_up();
        second.give_up();
        all_idle({&first, &second}, std::chrono::seconds(30));
        std::fprintf(stderr, "calls did not end within a minute\n");
        outcome.waits = false;
    }

    for (const Rank* rank : {&first, &second}) {
        const RankMemory found = rank->read();
        if (found.wrong != 0) {
            std::fprintf(stderr, "%u values were of another call\n", found.wrong);
            outcome.values = false;
        }
        if (abort_code(rank->record()) != AbortCode::none) {
            const Diagnosis& who = rank->record().diagnosis;
            std::fprintf(stderr, "block %u waited in vain for word %u of rank %u: %llu, not %llu\n",
                         who.core, who.signal, who.peer, static_cast<unsigned long long>(who.seen),
                         static_cast<unsigned long long>(who.wanted));
            outcome.waits = false;
        }
        if (found.state.failed != 0) outcome.waits = false;
        outcome.counts &= found.state.epoch == outcome.calls + 1 && found.state.blocks_done == 0;
        outcome.counts &= found.finished.value == outcome.calls;
        for (unsigned word = 0; word < kWords; ++word) {
            std::uint64_t additions = 0;
            std::uint64_t set = 0;
            for (std::size_t plan = 0; plan < std::size(kPlans); ++plan) {
                if (kPlans[plan].first <= word && word < kPlans[plan].end) {
                    additions += calls[plan] * kPlans[plan].additions();
                    set = std::max(set, latest[plan]);
                }
            }
            outcome.counts &= found.added[word].value == additions;
            outcome.counts &= found.expected[word].value == additions;
            outcome.counts &= found.set[word].value == set;
        }
    }
    return outcome;
}

const NamedFault* fault_named(const char* name) {
    for (const NamedFault& each : kFaults) {
        if (std::strcmp(each.name, name) == 0) return &each;
    }
    return nullptr;
}

int check_words(int devices, const NamedFault* planted) {
    if (devices == 2) {
        for (const int device : {0, 1}) {
            check(cudaSetDevice(device), "cudaSetDevice");
            check(cudaDeviceEnablePeerAccess(1 - device, 0), "cudaDeviceEnablePeerAccess");
        }
    }
    const Outcome found = run(devices, planted != nullptr ? planted->fault : Fault::none);
    const auto text = [](bool held) { return held ? "true" : "false"; };
    std::printf(
        "{\"values\": %s, \"waits\": %s, \"counts\": %s, \"replays\": %d, \"eager\": %d, "
        "\"calls\": %llu}\n",
        text(found.values), text(found.waits), text(found.counts), found.replays, found.eager,
        static_cast<unsigned long long>(found.calls));
    if (planted == nullptr) return found.values && found.waits && found.counts ? 0 : 1;
    const bool missed = std::strcmp(planted->caught_by, "values") == 0 ? found.values : found.waits;
    return missed ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
    // So many that no two streams share one, where a waiting call would hold up the one that it waits for.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    const std::string command = argc > 1 ? argv[1] : "";
    const int devices = argc > 2 ? std::atoi(argv[2]) : 1;
    const NamedFault* planted = argc > 3 ? fault_named(argv[3]) : nullptr;
    try {
        if (command == "faults") {
            for (const NamedFault& each : kFaults) std::printf("%s\n", each.name);
            return 0;
        }
        if (command == "check" && (devices == 1 || devices == 2) &&
            (argc <= 3 || planted != nullptr)) {
            return check_words(devices, planted);
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    std::fprintf(stderr, "usage: replayed_words check [1|2 [FAULT]] | replayed_words faults\n");
    return 2;
}
