// Litmus tests of the orders that kernels rely on, each repeated in one pair of running kernels: message
// passing by every way of raising a word, through a third block, and by words that show themselves.
//
//   litmus check DEVICES [ITERATIONS]     writer on device 0, reader on device DEVICES - 1; prints, by test,
//                                         how many iterations read what the order forbids; 1 where one did
//   litmus check DEVICES ITERATIONS late  the same with data that is written after the reader has looked, which
//                                         each test must find wrong in every iteration: 0 where it did
//
// `unordered` beside them raises the word without a release: what it finds is allowed, and says how often this
// device shows what the others must not. Every wait has a deadline.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device/mailbox.cuh"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/transport/clock.hpp"
#include "backends/transport/signal.hpp"

using namespace mkernel::transport;
namespace mailbox = mkernel::cuda::mailbox;
using mkernel::cuda::check;

namespace {

constexpr unsigned kThreads = 128;
constexpr unsigned kSlots = 256;  // more lines than wait in any queue
constexpr std::uint64_t kDeadlineNs = 5'000'000'000;

enum class Order : int { set, add, fenced, every_thread, passed_on, words, unordered };
constexpr const char* kNames[] = {"set",       "add",   "fenced",   "every_thread",
                                  "passed_on", "words", "unordered"};
constexpr int kOrders = static_cast<int>(std::size(kNames));

// In memory of the reader's device. Words lie in lines of their own.
struct Inbox {
    alignas(128) SetWord set;
    alignas(128) AddedWord added;
    alignas(128) SetWord passed_on;
    alignas(128) uint4 data[kSlots][kThreads];
    alignas(128) uint4 words[2][kThreads];
    alignas(128) std::uint64_t wrong;  // iterations
    std::uint64_t done;
};

// In memory of the writer's device.
struct Acknowledged {
    alignas(128) SetWord looked;
    alignas(128) SetWord read;
};

struct Args {
    Inbox* inbox;
    Acknowledged* acknowledged;
    std::uint64_t iterations;
    Order order;
    bool late;
};

__device__ uint4 value_of(std::uint64_t iteration, unsigned thread) {
    const auto low = static_cast<std::uint32_t>(iteration);
    return {low, low ^ thread, low * 2654435761u, ~low};
}

__device__ unsigned slot_of(std::uint64_t iteration) {
    return static_cast<unsigned>((iteration * 0x9E3779B97F4A7C15u) >> 40) % kSlots;
}

__device__ bool equal(uint4 a, uint4 b) {
    return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}

// Whether thread 0 saw the word come. All threads of a block. It polls without a pause, to look as soon as
// the word is there.
__device__ bool all_wait(const Word& word, std::uint64_t wanted) {
    bool come = true;
    if (threadIdx.x == 0) {
        const std::uint64_t start = global_ns();
        while (!word.reached(wanted)) {
            if (global_ns() - start > kDeadlineNs) {
                come = false;
                break;
            }
        }
    }
    return __syncthreads_and(come) != 0;
}

__device__ void write(const Args& args, std::uint64_t iteration) {
    const uint4 value = value_of(iteration, threadIdx.x);
    args.inbox->data[slot_of(iteration)][threadIdx.x] = value;
}

__device__ void raise(const Args& args, std::uint64_t iteration) {
    Inbox& inbox = *args.inbox;
    if (args.order == Order::every_thread) {
        inbox.added.add(1);
        return;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    switch (args.order) {
        case Order::add:
            inbox.added.add(kThreads);
            return;
        case Order::fenced:
            fence_system();
            inbox.set.set_fenced(iteration);
            return;
        case Order::unordered:
            store_relaxed(&inbox.set.value, iteration);
            return;
        default:
            inbox.set.set(iteration);
    }
}

// Words that show themselves need none that is raised, and lie in two areas by turns.
__device__ void send_words(const Args& args, std::uint64_t iteration) {
    auto* to = reinterpret_cast<char*>(&args.inbox->words[iteration % 2][threadIdx.x]);
    mailbox::send(to, mailbox::mailable(value_of(iteration, threadIdx.x)));
}

__global__ void writer(const Args args) {
    const bool words = args.order == Order::words;
    for (std::uint64_t iteration = 1; iteration <= args.iterations; ++iteration) {
        if (!all_wait(args.acknowledged->read, iteration - 1)) return;
        if (args.late) {
            if (!words) raise(args, iteration);
            if (!all_wait(args.acknowledged->looked, iteration)) return;
        }
        if (words) {
            send_words(args, iteration);
        } else {
            write(args, iteration);
        }
        if (!words && !args.late) raise(args, iteration);
    }
}

// Passes on what it sees, having looked at no data itself.
__global__ void third(const Args args) {
    for (std::uint64_t iteration = 1; iteration <= args.iterations; ++iteration) {
        if (!all_wait(args.inbox->set, iteration)) return;
        if (threadIdx.x == 0) args.inbox->passed_on.set(iteration);
    }
}

__device__ bool has_come(const Args& args, std::uint64_t iteration) {
    const Inbox& inbox = *args.inbox;
    switch (args.order) {
        case Order::add:
        case Order::every_thread:
            return all_wait(inbox.added, iteration * kThreads);
        case Order::passed_on:
            return all_wait(inbox.passed_on, iteration);
        default:
            return all_wait(inbox.set, iteration);
    }
}

// What a thread finds in the iteration, where it has come in time.
__device__ bool find(const Args& args, std::uint64_t iteration, uint4& found) {
    if (args.order != Order::words) {
        if (!has_come(args, iteration)) return false;
        found = args.inbox->data[slot_of(iteration)][threadIdx.x];
        return true;
    }
    auto* at = reinterpret_cast<char*>(&args.inbox->words[iteration % 2][threadIdx.x]);
    const std::uint64_t start = global_ns();
    // `late`: words are taken before they were sent.
    while (!mailbox::is_all(found = mailbox::look(at)) && !args.late) {
        if (global_ns() - start > kDeadlineNs) return false;
    }
    mailbox::clear(at);
    return true;
}

__global__ void reader(const Args args) {
    Inbox& inbox = *args.inbox;
    for (std::uint64_t iteration = 1; iteration <= args.iterations; ++iteration) {
        uint4 found{};
        const bool come = find(args, iteration, found);
        if (__syncthreads_and(come) == 0) return;
        uint4 wanted = value_of(iteration, threadIdx.x);
        if (args.order == Order::words) wanted = mailbox::mailable(wanted);
        const bool wrong = __syncthreads_or(!equal(found, wanted)) != 0;
        if (threadIdx.x == 0) {
            inbox.wrong += wrong ? 1 : 0;
            inbox.done = iteration;
            args.acknowledged->looked.set(iteration);
            args.acknowledged->read.set(iteration);
        }
    }
}

// Memory and a stream of one device.
template <class T>
class On {
  public:
    explicit On(int device) : device_(device) {
        use();
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
        check(cudaMalloc(&memory_, sizeof(T)), "cudaMalloc");
        check(cudaMemset(memory_, 0, sizeof(T)), "cudaMemset");
    }
    ~On() {
        cudaSetDevice(device_);
        cudaStreamDestroy(stream_);
        cudaFree(memory_);
    }
    On(const On&) = delete;
    On& operator=(const On&) = delete;

    void use() const { check(cudaSetDevice(device_), "cudaSetDevice"); }
    void launch(void (*kernel)(Args), const Args& args) const {
        use();
        kernel<<<1, kThreads, 0, stream_>>>(args);
        check(cudaGetLastError(), "launching a kernel");
    }
    void finish() const {
        use();
        check(cudaStreamSynchronize(stream_), "a kernel");  // which ends by its deadlines
    }
    [[nodiscard]] T* memory() const { return memory_; }

  private:
    int device_;
    cudaStream_t stream_ = nullptr;
    T* memory_ = nullptr;
};

std::uint64_t run(int devices, Order order, std::uint64_t iterations, bool late) {
    const On<Acknowledged> first(0);
    const On<Inbox> second(devices - 1);
    const On<int> between(0);
    for (void (*kernel)(Args) : {writer, third, reader}) {  // loading waits for kernels that run
        cudaFuncAttributes loaded{};
        for (int device = 0; device < devices; ++device) {
            check(cudaSetDevice(device), "cudaSetDevice");
            check(cudaFuncGetAttributes(&loaded, kernel), "loading a kernel");
        }
    }
    first.use();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    second.use();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const Args args{second.memory(), first.memory(), iterations, order, late};
    second.launch(reader, args);
    if (order == Order::passed_on) between.launch(third, args);
    first.launch(writer, args);
    first.finish();
    between.finish();
    second.finish();
    Inbox found;
    check(cudaMemcpy(&found, second.memory(), sizeof(found), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (found.done != iterations) {
        throw std::runtime_error(std::string(kNames[static_cast<int>(order)]) + " stopped after " +
                                 std::to_string(found.done) + " iterations: a wait timed out");
    }
    return found.wrong;
}

int check_orders(int devices, std::uint64_t iterations, bool late) {
    if (devices == 2) {
        for (const int device : {0, 1}) {
            check(cudaSetDevice(device), "cudaSetDevice");
            check(cudaDeviceEnablePeerAccess(1 - device, 0), "cudaDeviceEnablePeerAccess");
        }
    }
    bool held = true;
    std::printf("{\"iterations\": %llu", static_cast<unsigned long long>(iterations));
    for (int number = 0; number < kOrders; ++number) {
        const auto order = static_cast<Order>(number);
        const std::uint64_t wrong = run(devices, order, iterations, late);
        std::printf(", \"%s\": %llu", kNames[number], static_cast<unsigned long long>(wrong));
        if (late) {
            held &= wrong == iterations;
        } else if (order != Order::unordered) {
            held &= wrong == 0;
        }
    }
    std::printf("}\n");
    return held ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    const bool late = count == 5 && std::strcmp(arguments[4], "late") == 0;
    const int devices = count >= 3 ? std::atoi(arguments[2]) : 0;
    if (count < 3 || std::strcmp(arguments[1], "check") != 0 || devices < 1 || devices > 2 ||
        (count == 5 && !late) || count > 5) {
        std::fprintf(stderr, "usage: litmus check 1|2 [ITERATIONS [late]]\n");
        return 2;
    }
    const std::uint64_t iterations =
        count >= 4 ? std::strtoull(arguments[3], nullptr, 10) : 200'000;
    try {
        return check_orders(devices, iterations, late);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
