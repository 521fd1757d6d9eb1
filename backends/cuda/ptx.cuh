// Memory order and clocks of any CUDA device, one PTX instruction each.
//
// `.sys` scope throughout: peers are other GPUs and the host. Acquire loads see everything that the
// matching release published.
#pragma once

#include <cstdint>

namespace mkernel::cuda::ptx {

__device__ inline std::uint64_t load_acquire(const std::uint64_t* at) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ inline std::uint64_t load_relaxed(const std::uint64_t* at) {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ inline std::uint32_t load_relaxed(const std::uint32_t* at) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ inline void store_release(std::uint64_t* at, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Publishes what came before a `fence_system` of this thread; several such stores share one fence,
// where a release each would wait for the one before it to arrive.
__device__ inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ inline void fence_system() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Nanoseconds; the same clock on all SMs, coarse (about 1 us), not comparable between GPUs.
__device__ inline std::uint64_t global_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

}  // namespace mkernel::cuda::ptx
