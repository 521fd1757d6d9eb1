// Loads, stores and additions of words that several processors share: threads, processes, GPUs, NICs.
//
// One set of names for both compilers: std::atomic_ref in host code, one PTX instruction each in device
// code. System scope throughout, since the other side may be another GPU or the host; device code may
// use them on any global memory (its own, a peer's, pinned host memory). signal.hpp states which order they
// give, and why that is enough.
//
// Bulk copies of a GPU (its async proxy) need fences of their own beside these.
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"

#ifndef __CUDA_ARCH__
#include "backends/transport/shared_word.hpp"
#endif

namespace mkernel::transport {

#ifdef __CUDA_ARCH__

MKERNEL_HOST_DEVICE inline std::uint64_t load_relaxed(const std::uint64_t* at) {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

MKERNEL_HOST_DEVICE inline std::uint32_t load_relaxed(const std::uint32_t* at) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

MKERNEL_HOST_DEVICE inline std::uint64_t load_acquire(const std::uint64_t* at) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

MKERNEL_HOST_DEVICE inline std::uint32_t load_acquire(const std::uint32_t* at) {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

MKERNEL_HOST_DEVICE inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

MKERNEL_HOST_DEVICE inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

MKERNEL_HOST_DEVICE inline void store_release(std::uint64_t* at, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

MKERNEL_HOST_DEVICE inline void store_release(std::uint32_t* at, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Adds without returning a value: cheaper than fetch_add_release where the memory is far away.
MKERNEL_HOST_DEVICE inline void add_release(std::uint64_t* at, std::uint64_t value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Adds; returns the value before.
MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_release(std::uint64_t* at, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.release.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before;
}

#else

MKERNEL_HOST_DEVICE inline std::uint64_t load_relaxed(const std::uint64_t* at) {
    return shared(*at).load(std::memory_order_relaxed);
}

MKERNEL_HOST_DEVICE inline std::uint32_t load_relaxed(const std::uint32_t* at) {
    return shared(*at).load(std::memory_order_relaxed);
}

MKERNEL_HOST_DEVICE inline std::uint64_t load_acquire(const std::uint64_t* at) {
    return shared(*at).load(std::memory_order_acquire);
}

MKERNEL_HOST_DEVICE inline std::uint32_t load_acquire(const std::uint32_t* at) {
    return shared(*at).load(std::memory_order_acquire);
}

MKERNEL_HOST_DEVICE inline void store_relaxed(std::uint64_t* at, std::uint64_t value) {
    shared(*at).store(value, std::memory_order_relaxed);
}

MKERNEL_HOST_DEVICE inline void store_relaxed(std::uint32_t* at, std::uint32_t value) {
    shared(*at).store(value, std::memory_order_relaxed);
}

MKERNEL_HOST_DEVICE inline void store_release(std::uint64_t* at, std::uint64_t value) {
    shared(*at).store(value, std::memory_order_release);
}

MKERNEL_HOST_DEVICE inline void store_release(std::uint32_t* at, std::uint32_t value) {
    shared(*at).store(value, std::memory_order_release);
}

// Adds without returning a value: cheaper than fetch_add_release on a device.
MKERNEL_HOST_DEVICE inline void add_release(std::uint64_t* at, std::uint64_t value) {
    shared(*at).fetch_add(value, std::memory_order_release);
}

// Adds; returns the value before.
MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_release(std::uint64_t* at, std::uint64_t value) {
    return shared(*at).fetch_add(value, std::memory_order_release);
}

#endif

#ifdef __CUDACC__
// Orders all earlier accesses of this thread, and those of others that it knows of, before all later ones.
// Several relaxed stores can share one fence, where each of several releases would wait for the previous one.
__device__ inline void fence_system() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
#endif

}  // namespace mkernel::transport
