// Blocks of a kernel as threads of the host, a thread for each of the kernel's. Include it before headers of kernels,
// and the standard library before it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "backends/transport/atomics.hpp"

#define __CUDACC__
#undef __device__
#undef __host__
#undef __noinline__
#define __device__
#define __host__
#define __noinline__

namespace mkernel::host_kernels {

struct Place {
    unsigned x = 0, y = 0, z = 0;
};
struct Warp {
    std::barrier<> meet{32};
    std::array<std::uint64_t, 32> values{};
};
struct Block {
    explicit Block(unsigned threads) : meet(threads), warps(threads / 32) {}
    std::barrier<> meet;
    std::vector<Warp> warps;
};
inline thread_local Block* block = nullptr;

}  // namespace mkernel::host_kernels

inline thread_local mkernel::host_kernels::Place threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() {
    mkernel::host_kernels::block->meet.arrive_and_wait();
}
inline void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
namespace mkernel::transport {
inline void fence_system() {
    __threadfence();
}
}  // namespace mkernel::transport
inline void __nanosleep(unsigned) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}
inline unsigned atomicAdd(unsigned* at, unsigned by) {
    return std::atomic_ref(*at).fetch_add(by);
}
inline int atomicAdd(int* at, int by) {
    return std::atomic_ref(*at).fetch_add(by);
}
inline int __popc(unsigned bits) {
    return std::popcount(bits);
}
inline int __clz(int bits) {
    return std::countl_zero(static_cast<unsigned>(bits));
}
inline int __ffs(int bits) {
    return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1;
}
template <class Value>
Value __ldcv(const Value* at) {
    return *at;
}
inline float __int_as_float(int bits) {
    return std::bit_cast<float>(bits);
}
int __syncthreads_and(int);  // of kernels that no test runs
template <class Value>
Value min(Value a, Value b) {
    return a < b ? a : b;
}
template <class Value>
Value max(Value a, Value b) {
    return a > b ? a : b;
}

namespace mkernel::host_kernels {

// Calls body(value of each lane) in all lanes of a warp.
template <class Body>
auto with_lanes(std::uint64_t mine, Body&& body) {
    Warp& warp = block->warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = mine;
    warp.meet.arrive_and_wait();
    const auto found = body(warp.values);
    warp.meet.arrive_and_wait();
    return found;
}

// Runs kernel(shared memory of the block) on a grid, to its end.
template <class Shared, class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel&& kernel) {
    std::vector<std::thread> running;
    std::vector<std::unique_ptr<Block>> made;
    std::vector<Shared> shared(blocks);
    for (unsigned number = 0; number < blocks; ++number) {
        made.push_back(std::make_unique<Block>(threads));
        for (unsigned thread = 0; thread < threads; ++thread) {
            running.emplace_back([&, number, thread, here = made.back().get()] {
                block = here;
                threadIdx = {thread}, blockIdx = {number}, blockDim = {threads, 1, 1};
                gridDim = {blocks, 1, 1};
                kernel(shared[number]);
            });
        }
    }
    for (std::thread& each : running) each.join();
}

}  // namespace mkernel::host_kernels

inline unsigned __match_any_sync(unsigned, int mine) {
    return mkernel::host_kernels::with_lanes(static_cast<std::uint64_t>(mine), [&](auto& all) {
        unsigned same = 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            if (all[lane] == static_cast<std::uint64_t>(mine)) same |= 1u << lane;
        }
        return same;
    });
}
inline unsigned __reduce_or_sync(unsigned, unsigned mine) {
    return mkernel::host_kernels::with_lanes(mine, [](auto& all) {
        std::uint64_t any = 0;
        for (const std::uint64_t each : all) any |= each;
        return static_cast<unsigned>(any);
    });
}
