#include <cuda_runtime.h>

#include "backends/accelerators/cuda/small_launch.cuh"
#include "tests/native/cuda/fifo_kernels.hpp"

namespace mkernel::testing {

namespace {

using transport::DeviceLimits;
using transport::FifoDevice;
using transport::WaitResult;
namespace near = transport::near;

__device__ void count(Ends* ends, WaitResult result) {
    atomicAdd(&ends->of[static_cast<std::uint32_t>(result)], 1u);
}

__global__ void push_numbered_kernel(FifoDevice fifo, DeviceLimits limits, std::uint32_t each,
                                     Fault fault, Ends* ends) {
    const std::uint32_t producer = blockIdx.x * blockDim.x + threadIdx.x;
    WaitResult result = WaitResult::ok;
    for (std::uint32_t number = 0; number < each && result == WaitResult::ok; ++number) {
        result = push(fifo, numbered(producer, number), limits, fault);
    }
    count(ends, result);
}

// By one thread.
__device__ WaitResult wait_for(const transport::Word& word, std::uint64_t wanted,
                               const DeviceLimits& limits) {
    const std::uint64_t start = near::now_ns();
    while (true) {
        for (int poll = 0; poll < 256; ++poll) {
            if (word.reached(wanted)) return WaitResult::ok;
        }
        if (transport::load_relaxed(limits.abort) != 0) return WaitResult::aborted;
        if (late(start, limits)) return WaitResult::timed_out;
    }
}

__global__ void round_trips_kernel(FifoDevice fifo, DeviceLimits limits, RoundTrips trips) {
    if (blockIdx.x == 1) {
        WaitResult result = WaitResult::ok;
        for (std::uint32_t round = 1; round <= trips.rounds && result == WaitResult::ok; ++round) {
            result = transport::republish(trips.run, round, limits);
        }
        count(trips.ends, result);
        return;
    }
    const bool copy = trips.run.copies != nullptr;
    const transport::Word& word = copy ? *trips.run.copies : *trips.run.words;
    const std::uint64_t before = copy ? 0 : trips.run.words->load();
    const std::uint64_t start_ns = near::now_ns();
    const long long start = clock64();
    WaitResult result = WaitResult::ok;
    for (std::uint32_t round = 0; round < trips.rounds && result == WaitResult::ok; ++round) {
        const long long begin = clock64();
        result = fifo.push(trips.command, limits);
        if (result == WaitResult::ok) result = wait_for(word, before + round + 1, limits);
        trips.ticks[round] = static_cast<std::uint32_t>(clock64() - begin);
    }
    trips.totals[0] = near::now_ns() - start_ns;
    trips.totals[1] = static_cast<std::uint64_t>(clock64() - start);
    count(trips.ends, result);
}

// Each round's copy; with the fault before the host raised its word.
__device__ WaitResult republish_rounds(const DeviceLimits& limits, const Watch& what, Fault fault) {
    WaitResult result = WaitResult::ok;
    for (std::uint32_t round = 1; round <= what.rounds && result == WaitResult::ok; ++round) {
        if (fault == Fault::republish_before_word) {
            what.run.copies->set(round);
            result = wait_for(*what.run.words, round, limits);
        } else {
            result = transport::republish(what.run, round, limits);
        }
    }
    return result;
}

__global__ void watch_kernel(DeviceLimits limits, Watch what, Fault fault) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        transport::store_release(what.started, std::uint64_t{1});
        count(what.ends, republish_rounds(limits, what, fault));
        return;
    }
    const std::uint32_t watchers = gridDim.x - 1;
    WaitResult result = WaitResult::ok;
    for (std::uint32_t round = 1; round <= what.rounds && result == WaitResult::ok; ++round) {
        result = wait_for(*what.run.copies, round, limits);
        if (result != WaitResult::ok) break;
        // A plain load, as of what a NIC wrote.
        if (*what.payload < round) atomicAdd(what.wrong, 1u);
        __threadfence();
        if (atomicAdd(&what.arrived->read, 1u) + 1 == watchers * round) {
            transport::store_release(what.acknowledged, std::uint64_t{round});
        }
    }
    count(what.ends, result);
}

}  // namespace

void push_numbered(FifoDevice fifo, DeviceLimits limits, std::uint32_t blocks,
                   std::uint32_t threads, std::uint32_t each, Fault fault, Ends* ends,
                   cudaStream_t stream) {
    cuda::launch_small("push_numbered", push_numbered_kernel, blocks, threads, 0, stream, fifo,
                       limits, each, fault, ends);
}

void round_trips(FifoDevice fifo, DeviceLimits limits, const RoundTrips& trips,
                 cudaStream_t stream) {
    cuda::launch_small("round_trips", round_trips_kernel, trips.run.copies != nullptr ? 2 : 1, 1, 0,
                       stream, fifo, limits, trips);
}

void watch(DeviceLimits limits, const Watch& what, Fault fault, cudaStream_t stream) {
    cuda::launch_small("watch", watch_kernel, what.blocks, 32, 0, stream, limits, what, fault);
}

}  // namespace mkernel::testing
