// Memory order and clocks, one PTX instruction each.
//
// `.sys` scope throughout: peers are other GPUs and the host. Acquire loads see everything that the
// matching release published; bulk copies (the async proxy) need `fence_async_proxy` on top: after
// an acquire and before a bulk load of the data, and after generic writes that a bulk store reads.
#pragma once

#include <cstdint>

namespace mkernel::hopper::ptx {

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

// Orders generic accesses and bulk copies of this thread, in both directions, all state spaces.
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for shared memory only.
__device__ inline void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A grid that is launched to start early (programmatic stream serialization) may read what the grid
// before it on its stream wrote, and write what that one reads, only after this.
__device__ inline void wait_for_grid_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Nanoseconds; the same clock on all SMs, coarse (about 1 us), not comparable between GPUs.
__device__ inline std::uint64_t global_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

template <int kRegisters>
__device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// One thread of the (converged) warp.
__device__ inline bool elect_one() {
    std::uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(elected));
    return elected != 0;
}

}  // namespace mkernel::hopper::ptx
