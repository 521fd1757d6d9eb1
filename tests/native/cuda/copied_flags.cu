// Flags that copy engines copy behind their data, as the Hopper backend sends rows and parts (push_rows,
// push_part): GPU 0 copies numbered blocks to GPU 1, and each one's flag behind it on the same stream; a
// kernel on GPU 1 waits for every flag and then checks every word of the block, by plain loads and by bulk
// loads. tests/gpu runs it, bench/measurements.py writes what it finds.
//
//   copied_flags check [ITERATIONS]       prints what it found as JSON; 1 where a word was wrong or a flag
//                                         did not come
//   copied_flags check ITERATIONS FAULT   the same with a planted fault (kFaults): 0 where both ways of
//                                         loading caught it in every iteration
//   copied_flags unheld ITERATIONS FAULT  the same where nothing holds the data back until they have been
//                                         looked at: prints how often the fault shows by itself
//   copied_flags faults                   prints the names of the faults, one a line
//
// ITERATIONS is a multiple of kLap. Blocks lie in a ring; laps are eager copies and graphs by turns, and run
// ahead of the checks by the ring. In their second half a kernel on GPU 0 stores to GPU 1 all the time, so
// that the link is busy. Every wait has a deadline.
#include <cuda_runtime.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/memory.hpp"
#include "backends/accelerators/cuda/ptx/bulk.cuh"
#include "backends/accelerators/cuda/ptx/sync.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/transport/device_wait.cuh"

using namespace mkernel::transport;
using mkernel::cuda::check;
using mkernel::cuda::DeviceMemory;
using mkernel::cuda::launch_small;
using mkernel::cuda::load_kernel;
namespace ptx = mkernel::cuda::ptx;

namespace {

constexpr unsigned kLap = 500;         // iterations of a graph
constexpr unsigned kSlots = 2 * kLap;  // of the ring
constexpr unsigned kSizes[] = {16, 4 << 10, 64 << 10};
constexpr unsigned kMostBytes = 64 << 10;
constexpr unsigned kFillers = 32, kReceivers = 16, kThreads = 256;
constexpr unsigned kTrafficBlocks = 16, kTrafficBytes = 16 << 20;
constexpr int kSender = 0, kReceiver = 1;  // devices
constexpr std::uint64_t kDeadlineNs = 10'000'000'000u;
constexpr std::uint64_t kDefaultIterations = 1'000'000;

enum class Fault { none, flag_before_data, flag_on_another_stream, last_word_left_out };

struct NamedFault {
    const char* name;
    Fault fault;
};
constexpr NamedFault kFaults[] = {
    {"flag_before_data", Fault::flag_before_data},
    {"flag_on_another_stream", Fault::flag_on_another_stream},
    {"last_word_left_out", Fault::last_word_left_out},
};

// Iterations are numbered from 1 on.
__host__ __device__ constexpr unsigned slot_of(std::uint64_t number) {
    return static_cast<unsigned>((number - 1) % kSlots);
}

// Drawn by the slot, since a graph's copies have their sizes for ever.
__host__ __device__ constexpr unsigned bytes_of(unsigned slot) {
    std::uint64_t mixed = (slot + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed ^= mixed >> 27;
    const unsigned sizes[] = {kSizes[0], kSizes[1], kSizes[2]};
    return sizes[mixed % 3];
}

// Copied as two slices of the columns of a matrix, as a last shard is.
constexpr bool in_slices(unsigned slot) {
    return bytes_of(slot) == kMostBytes && slot % 2 == 1;
}

struct Block {
    alignas(256) std::uint64_t words[kMostBytes / sizeof(std::uint64_t)];
};

enum Way { kPlain, kBulk, kWays };

struct Found {
    unsigned long long checked;  // iterations
    unsigned long long waited;   // of them, those whose flag was not there at the first look
    unsigned long long wrong_words[kWays];
    unsigned long long wrong_iterations[kWays];
    unsigned long long first_number, first_at, first_seen;  // of the wrong words
};

// In memory of GPU 0.
struct SenderMemory {
    CallState state;  // its epoch is the number of the next lap, from 1 on
    unsigned long long traffic_bytes;
    SetWord acknowledged[kSlots];  // by GPU 1: the last iteration that was checked in the slot
    SetWord numbers[kSlots];       // what flags are copied from
    Block blocks[kSlots];
};

// In memory of GPU 1.
struct ReceiverMemory {
    CallState state;
    Found found;
    SetWord flags[kSlots];
    Block blocks[kSlots];
    uint4 traffic[kTrafficBytes / sizeof(uint4)];
};

// The next lap's blocks and the words of their flags, once GPU 1 has checked what lay in their slots.
__global__ void fill_kernel(SenderMemory* own, WaitLimits limits) {
    const DeviceWaiter waiter(own->state, limits, Waiter::comm_kernel);
    const std::uint64_t lap = own->state.epoch;
    for (unsigned at = blockIdx.x; at < kLap; at += gridDim.x) {
        const std::uint64_t number = (lap - 1) * kLap + at + 1;
        const unsigned slot = slot_of(number);
        const std::uint64_t before = number > kSlots ? number - kSlots : 0;
        const bool free = threadIdx.x != 0 || waiter.until(own->acknowledged[slot], before,
                                                           {slot, kReceiver, kNoChunk});
        if (!__syncthreads_and(free)) break;
        const unsigned words = bytes_of(slot) / sizeof(std::uint64_t);
        for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
            own->blocks[slot].words[i] = number;
        }
        if (threadIdx.x == 0) own->numbers[slot].set(number);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_system();
    if (!own->state.is_last_block()) return;
    fence_system();
    own->state.move_on(lap);
}

// A fault's: what is behind this on the stream comes after GPU 1 has looked.
__global__ void hold_kernel(SenderMemory* own, unsigned slot, WaitLimits limits) {
    const DeviceWaiter waiter(own->state, limits, Waiter::comm_kernel);
    waiter.until(own->acknowledged[slot], own->numbers[slot].load(), {slot, kReceiver, kNoChunk});
}

// Until the host says so by the abort word, or its time is over.
__global__ void traffic_kernel(SenderMemory* own, ReceiverMemory* peer, WaitLimits limits) {
    constexpr unsigned kPieces = kTrafficBytes / sizeof(uint4);
    const std::uint64_t start = global_ns();
    unsigned pass = 0;
    while (true) {
        const bool over = threadIdx.x == 0 && (load_relaxed(&limits.host->abort) != 0 ||
                                               global_ns() - start > limits.timeout_ns);
        if (__syncthreads_or(over)) break;
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < kPieces;
             i += gridDim.x * blockDim.x) {
            peer->traffic[i] = make_uint4(pass, pass, pass, pass);
        }
        ++pass;
    }
    const unsigned long long written = kTrafficBytes / gridDim.x;
    if (threadIdx.x == 0) atomicAdd(&own->traffic_bytes, pass * written);
}

// Every other block begins with polls that acquire and do not pause, so that its loads follow the first
// look that sees the flag.
__device__ bool comes(const DeviceWaiter& waiter, const SetWord& flag, std::uint64_t number,
                      unsigned slot) {
    for (int poll = 0; blockIdx.x % 2 == 1 && poll < 4096; ++poll) {
        if (flag.reached(number)) return true;
    }
    return waiter.until(flag, number, {slot, kSender, kNoChunk});
}

// How many of a block's words this thread finds wrong.
__device__ unsigned wrong_words(const Block& block, unsigned bytes, std::uint64_t number, Way way,
                                Found& found) {
    const auto* const pairs = reinterpret_cast<const ulonglong2*>(block.words);
    unsigned wrong = 0;
    for (unsigned i = threadIdx.x; i < bytes / sizeof(ulonglong2); i += blockDim.x) {
        const ulonglong2 pair = pairs[i];
        const unsigned here = (pair.x != number) + (pair.y != number);
        if (here == 0) continue;
        wrong += here;
        if (atomicAdd(&found.wrong_words[way], static_cast<unsigned long long>(here)) == 0 &&
            atomicCAS(&found.first_number, 0ull, static_cast<unsigned long long>(number)) == 0) {
            found.first_at = 2 * i + (pair.x == number);
            found.first_seen = pair.x == number ? pair.y : pair.x;
        }
    }
    return wrong;
}

__global__ void receive_kernel(ReceiverMemory* own, SenderMemory* peer, std::uint64_t iterations,
                               WaitLimits limits) {
    extern __shared__ __align__(128) unsigned char shared[];
    Block& loaded = *reinterpret_cast<Block*>(shared);
    __shared__ ptx::Mbarrier landed;
    if (threadIdx.x == 0) {
        landed.init(1);
        ptx::publish_barriers();
    }
    __syncthreads();

    const DeviceWaiter waiter(own->state, limits, Waiter::compute_kernel);
    Found& found = own->found;
    unsigned parity = 0;
    for (std::uint64_t number = blockIdx.x + 1; number <= iterations; number += gridDim.x) {
        const unsigned slot = slot_of(number);
        const unsigned bytes = bytes_of(slot);
        const SetWord& flag = own->flags[slot];
        const Block& block = own->blocks[slot];
        const bool early = threadIdx.x == 0 && flag.peek() < number;

        // One thread of each warp, so that no barrier delays the loads.
        bool come = threadIdx.x % 32 != 0 || comes(waiter, flag, number, slot);
        come = __all_sync(~0u, come);
        __syncwarp();  // orders memory, which a vote need not
        if (come && threadIdx.x == 0) {
            ptx::fence_async_proxy();
            landed.expect(bytes);
            ptx::load_bytes(&loaded, &block, bytes, &landed);
        }
        const unsigned plain = come ? wrong_words(block, bytes, number, kPlain, found) : 0;
        if (come && threadIdx.x == 0) landed.wait(parity);
        if (!__syncthreads_and(come)) return;
        landed.wait(parity);
        parity ^= 1;
        const unsigned bulk = wrong_words(loaded, bytes, number, kBulk, found);

        const bool any_plain = __syncthreads_or(plain != 0) != 0;
        const bool any_bulk = __syncthreads_or(bulk != 0) != 0;
        if (threadIdx.x != 0) continue;
        if (any_plain) atomicAdd(&found.wrong_iterations[kPlain], 1ull);
        if (any_bulk) atomicAdd(&found.wrong_iterations[kBulk], 1ull);
        if (early) atomicAdd(&found.waited, 1ull);
        atomicAdd(&found.checked, 1ull);
        peer->acknowledged[slot].set(number);
    }
}

class Stream {
  public:
    explicit Stream(int device) : device_(device) {
        check(cudaSetDevice(device), "cudaSetDevice");
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    [[nodiscard]] cudaStream_t get() const { return stream_; }
    [[nodiscard]] bool idle() const {
        check(cudaSetDevice(device_), "cudaSetDevice");
        const cudaError_t found = cudaStreamQuery(stream_);
        if (found == cudaErrorNotReady) return false;
        check(found, "what a stream ran");
        return true;
    }

  private:
    int device_;
    cudaStream_t stream_ = nullptr;
};

class Event {
  public:
    explicit Event(int device) {
        check(cudaSetDevice(device), "cudaSetDevice");
        check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "an event");
    }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    // What `next` does from here on comes after all that `before` has by now.
    void order(const Stream& before, const Stream& next) {
        check(cudaEventRecord(event_, before.get()), "cudaEventRecord");
        check(cudaStreamWaitEvent(next.get(), event_, 0), "cudaStreamWaitEvent");
    }

  private:
    cudaEvent_t event_ = nullptr;
};

// A GPU's memory, zeroed, mapped as a rank's is: at another address for the kernels and copies of its peer.
template <class T>
class Symmetric {
  public:
    explicit Symmetric(int device)
        : own_(DeviceMemory::create(device, sizeof(T))), mapped_(map(own_, 1 - device)) {
        static_assert(offsetof(T, state) == 0 && offsetof(CallState, epoch) == 0);
        own_.write_word(0, 1);
    }
    [[nodiscard]] T* own() const { return reinterpret_cast<T*>(own_.address()); }
    [[nodiscard]] T* of_peer() const { return reinterpret_cast<T*>(mapped_.address()); }
    template <class Member>
    [[nodiscard]] Member get(Member T::*member) const {
        Member value;
        check(cudaSetDevice(own_.device()), "cudaSetDevice");
        check(cudaMemcpy(&value, &(own()->*member), sizeof(value), cudaMemcpyDeviceToHost),
              "cudaMemcpy");
        return value;
    }

  private:
    static DeviceMemory map(const DeviceMemory& memory, int device) {
        struct Handle {
            int fd;
            ~Handle() { close(fd); }
        };
        const Handle handle{memory.export_fd()};
        return DeviceMemory::attach(device, handle.fd, memory.mapped_bytes());
    }

    DeviceMemory own_;
    DeviceMemory mapped_;
};

class Control {
  public:
    Control() {
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, sizeof(HostControl),
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "cudaHostAlloc");
        control_ = new (memory) HostControl{};
    }
    ~Control() { cudaFreeHost(control_); }
    Control(const Control&) = delete;
    Control& operator=(const Control&) = delete;
    void end() { store_release(&control_->abort, 4u); }
    [[nodiscard]] WaitLimits limits(std::uint64_t timeout_ns) const {
        return {control_, timeout_ns, 0};
    }
    [[nodiscard]] const AbortRecord& record() const { return control_->record; }

  private:
    HostControl* control_ = nullptr;
};

struct Outcome {
    Found found{};
    bool waits = true;  // every flag came, and every acknowledgement
    std::uint64_t eager = 0, in_graphs = 0, in_slices = 0, beside_traffic = 0;
    std::array<std::uint64_t, std::size(kSizes)> of_size{};
    std::uint64_t traffic_bytes = 0;
    double seconds = 0;
};

class Litmus {
  public:
    // `held`: a faulty run holds its data back until they have been looked at.
    Litmus(Fault fault, bool held) : fault_(fault), held_(held) {
        check(cudaSetDevice(kReceiver), "cudaSetDevice");
        load_kernel(receive_kernel);
        check(cudaFuncSetAttribute(receive_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   sizeof(Block)),
              "cudaFuncSetAttribute");
        check(cudaSetDevice(kSender), "cudaSetDevice");
        load_kernel(fill_kernel);
        load_kernel(hold_kernel);
        load_kernel(traffic_kernel);
        if (fault_ == Fault::flag_on_another_stream) return;  // never in a graph
        for (unsigned half = 0; half < 2; ++half) capture(half);
    }
    ~Litmus() {
        // Kernels run here only after an error.
        for (Control* each : {&sender_control_, &receiver_control_, &traffic_control_}) {
            each->end();
        }
        for (const int device : {kReceiver, kSender}) {
            cudaSetDevice(device);
            cudaDeviceSynchronize();
        }
        for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    }
    Litmus(const Litmus&) = delete;
    Litmus& operator=(const Litmus&) = delete;

    Outcome run(std::uint64_t iterations) {
        Outcome outcome;
        const auto start = std::chrono::steady_clock::now();
        check(cudaSetDevice(kReceiver), "cudaSetDevice");
        launch_small("receive", receive_kernel, kReceivers, kThreads, sizeof(Block),
                     receiving_.get(), receiver_.own(), sender_.of_peer(), iterations,
                     receiver_control_.limits(kDeadlineNs));
        check(cudaSetDevice(kSender), "cudaSetDevice");
        const std::uint64_t laps = iterations / kLap;
        for (std::uint64_t lap = 0; lap < laps; ++lap) {
            if (lap == laps / 2) {
                launch_small("traffic", traffic_kernel, kTrafficBlocks, kThreads, 0, traffic_.get(),
                             sender_.own(), receiver_.of_peer(),
                             traffic_control_.limits(6 * kDeadlineNs));
            }
            const unsigned half = lap % 2;
            // A graph need not run branches at the same time: held data might hold up their flag.
            if (lap / 2 % 2 == 0 || fault_ == Fault::flag_on_another_stream) {
                enqueue(half);
                outcome.eager += kLap;
            } else {
                check(cudaGraphLaunch(graphs_[half], sending_.get()), "cudaGraphLaunch");
                outcome.in_graphs += kLap;
            }
            if (lap >= laps / 2) outcome.beside_traffic += kLap;
            for (unsigned at = 0; at < kLap; ++at) {
                outcome.in_slices += in_slices(half * kLap + at);
                for (unsigned size = 0; size < std::size(kSizes); ++size) {
                    outcome.of_size[size] += bytes_of(half * kLap + at) == kSizes[size];
                }
            }
        }
        if (!soon([&] { return receiving_.idle() && sending_.idle() && flagging_.idle(); }, 120)) {
            outcome.waits = false;
            receiver_control_.end();
            sender_control_.end();
        }
        traffic_control_.end();
        const bool over = soon(
            [&] {
                return receiving_.idle() && sending_.idle() && flagging_.idle() && traffic_.idle();
            },
            30);
        if (!over) throw std::runtime_error("kernels that were told to end run on");
        outcome.seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        outcome.found = receiver_.get(&ReceiverMemory::found);
        outcome.traffic_bytes = sender_.get(&SenderMemory::traffic_bytes);
        outcome.waits &= receiver_.get(&ReceiverMemory::state).failed == 0;
        outcome.waits &= sender_.get(&SenderMemory::state).failed == 0;
        outcome.waits &= outcome.found.checked == iterations;
        for (const Control* each : {&sender_control_, &receiver_control_}) tell(each->record());
        return outcome;
    }

  private:
    void capture(unsigned half) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(sending_.get(), cudaStreamCaptureModeThreadLocal),
              "capturing");
        enqueue(half);
        check(cudaStreamEndCapture(sending_.get(), &graph), "capturing");
        cudaGraphExec_t made = nullptr;
        const cudaError_t status = cudaGraphInstantiate(&made, graph, 0);
        cudaGraphDestroy(graph);
        check(status, "cudaGraphInstantiate");
        graphs_.push_back(made);
        check(cudaGraphUpload(made, sending_.get()), "cudaGraphUpload");
        check(cudaStreamSynchronize(sending_.get()), "cudaGraphUpload");
    }

    // A lap in one half of the ring.
    void enqueue(unsigned half) {
        launch_small("fill", fill_kernel, kFillers, kThreads, 0, sending_.get(), sender_.own(),
                     sender_control_.limits(kDeadlineNs));
        const bool apart = fault_ == Fault::flag_on_another_stream;
        if (apart) forked_.order(sending_, flagging_);
        for (unsigned slot = half * kLap; slot < (half + 1) * kLap; ++slot) {
            if (apart || fault_ == Fault::flag_before_data) {
                copy_flag(slot, apart ? flagging_ : sending_);
                if (held_) {
                    launch_small("hold", hold_kernel, 1, 1, 0, sending_.get(), sender_.own(), slot,
                                 sender_control_.limits(kDeadlineNs));
                }
                copy_data(slot);
            } else {
                copy_data(slot);
                copy_flag(slot, sending_);
            }
        }
        if (apart) joined_.order(flagging_, sending_);
    }

    void copy_data(unsigned slot) {
        const unsigned bytes = bytes_of(slot);
        Block* const to = &receiver_.of_peer()->blocks[slot];
        const Block* const from = &sender_.own()->blocks[slot];
        if (fault_ == Fault::last_word_left_out) {
            copy(to, from, bytes - sizeof(std::uint64_t), sending_);
        } else if (in_slices(slot)) {
            constexpr unsigned kPitch = 4096, kWidth = kPitch / 2;
            for (unsigned at = 0; at < kPitch; at += kWidth) {
                check(cudaMemcpy2DAsync(reinterpret_cast<char*>(to) + at, kPitch,
                                        reinterpret_cast<const char*>(from) + at, kPitch, kWidth,
                                        bytes / kPitch, cudaMemcpyDeviceToDevice, sending_.get()),
                      "cudaMemcpy2DAsync");
            }
        } else {
            copy(to, from, bytes, sending_);
        }
    }

    void copy_flag(unsigned slot, const Stream& stream) {
        copy(&receiver_.of_peer()->flags[slot], &sender_.own()->numbers[slot], sizeof(SetWord),
             stream);
    }

    static void copy(void* to, const void* from, std::size_t bytes, const Stream& stream) {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream.get()),
              "cudaMemcpyAsync");
    }

    template <class Held>
    static bool soon(const Held& held, int seconds) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
        while (!held()) {
            if (std::chrono::steady_clock::now() > deadline) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return true;
    }

    static void tell(const AbortRecord& record) {
        if (abort_code(record) == AbortCode::none) return;
        const Diagnosis& who = record.diagnosis;
        std::fprintf(stderr, "block %u waited in vain for slot %u of GPU %u: %llu, not %llu\n",
                     who.core, who.signal, who.peer, static_cast<unsigned long long>(who.seen),
                     static_cast<unsigned long long>(who.wanted));
    }

    Fault fault_;
    bool held_;
    Control sender_control_, receiver_control_, traffic_control_;
    Symmetric<SenderMemory> sender_{kSender};
    Symmetric<ReceiverMemory> receiver_{kReceiver};
    Stream sending_{kSender}, flagging_{kSender}, traffic_{kSender}, receiving_{kReceiver};
    Event forked_{kSender}, joined_{kSender};
    std::vector<cudaGraphExec_t> graphs_;
};

void print(const Outcome& outcome) {
    cudaDeviceProp device{};
    check(cudaGetDeviceProperties(&device, kReceiver), "cudaGetDeviceProperties");
    const Found& found = outcome.found;
    const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
    std::printf("{\"device\": \"%s\", \"iterations\": %llu, \"eager\": %llu, \"in_graphs\": %llu, ",
                device.name, found.checked, number(outcome.eager), number(outcome.in_graphs));
    std::printf("\"in_slices\": %llu, \"beside_traffic\": %llu, \"traffic_gb\": %.1f, ",
                number(outcome.in_slices), number(outcome.beside_traffic),
                static_cast<double>(outcome.traffic_bytes) / 1e9);
    std::printf("\"iterations_of_bytes\": {");
    for (unsigned size = 0; size < std::size(kSizes); ++size) {
        std::printf("%s\"%u\": %llu", size == 0 ? "" : ", ", kSizes[size],
                    number(outcome.of_size[size]));
    }
    std::printf("}, \"waited\": %llu, \"waits\": %s, ", found.waited,
                outcome.waits ? "true" : "false");
    std::printf("\"wrong_words\": {\"plain\": %llu, \"bulk\": %llu}, ", found.wrong_words[kPlain],
                found.wrong_words[kBulk]);
    std::printf("\"wrong_iterations\": {\"plain\": %llu, \"bulk\": %llu}, ",
                found.wrong_iterations[kPlain], found.wrong_iterations[kBulk]);
    std::printf("\"seconds\": %.2f}\n", outcome.seconds);
    if (found.first_number != 0) {
        std::fprintf(stderr, "first seen: word %llu of iteration %llu, %u bytes, was %llu\n",
                     found.first_at, found.first_number, bytes_of(slot_of(found.first_number)),
                     found.first_seen);
    }
}

// Whether a check of `iterations` held: without a fault nothing is wrong, with one all iterations are.
bool holds(const Outcome& outcome, bool planted, std::uint64_t iterations) {
    const std::uint64_t wanted = planted ? iterations : 0;
    for (const unsigned long long wrong : outcome.found.wrong_iterations) {
        if (wrong != wanted) return false;
    }
    return outcome.waits;
}

Fault fault_named(const char* name) {
    for (const NamedFault& each : kFaults) {
        if (std::strcmp(each.name, name) == 0) return each.fault;
    }
    return Fault::none;
}

}  // namespace

int main(int argc, char** argv) {
    // So many that no two streams share one, where a waiting kernel would hold up what it waits for.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    const std::string command = argc > 1 ? argv[1] : "";
    const std::uint64_t iterations =
        argc > 2 ? std::strtoull(argv[2], nullptr, 10) : kDefaultIterations;
    const Fault fault = argc > 3 ? fault_named(argv[3]) : Fault::none;
    const bool known = argc <= 3 || fault != Fault::none;
    try {
        if (command == "faults") {
            for (const NamedFault& each : kFaults) std::printf("%s\n", each.name);
            return 0;
        }
        const bool runs = command == "check" || (command == "unheld" && argc > 3);
        if (runs && known && iterations > 0 && iterations % kLap == 0) {
            const Outcome outcome = Litmus(fault, command == "check").run(iterations);
            print(outcome);
            if (command == "unheld") return outcome.waits ? 0 : 1;
            return holds(outcome, fault != Fault::none, iterations) ? 0 : 1;
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    std::fprintf(
        stderr,
        "usage: copied_flags check [ITERATIONS [FAULT]] | unheld ITERATIONS FAULT | faults; "
        "ITERATIONS in multiples of %u\n",
        kLap);
    return 2;
}
