// Atomic accesses of words that one producer's side alone shares, beside atomics.hpp: threads of a process,
// or of one GPU, for which the GPU's scope is enough and cheaper than the system's.
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"
#include "backends/transport/clock.hpp"

#ifndef __CUDA_ARCH__
#include "backends/transport/sleep.hpp"
#endif

namespace mkernel::transport::near {

#ifdef __CUDA_ARCH__

// Additions return the value before.
MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_acquire(std::uint64_t* at, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before;
}

MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_acq_rel(std::uint64_t* at, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(at), "l"(value)
                 : "memory");
    return before;
}

MKERNEL_HOST_DEVICE inline void add_release(std::uint64_t* at, std::uint64_t value) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Returns the value before.
MKERNEL_HOST_DEVICE inline std::uint32_t exchange_acquire(std::uint32_t* at, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.acquire.gpu.global.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(at), "r"(value)
                 : "memory");
    return before;
}

MKERNEL_HOST_DEVICE inline void store_release(std::uint32_t* at, std::uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Returns nanoseconds on the clock of this side.
MKERNEL_HOST_DEVICE inline std::uint64_t now_ns() {
    return global_ns();
}

// Pauses between two looks at a word that others change.
MKERNEL_HOST_DEVICE inline void pause() {
    __nanosleep(100);
}

#else

// A host has one scope.
using transport::add_release;
using transport::store_release;

// Additions return the value before.
MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_acquire(std::uint64_t* at, std::uint64_t value) {
    return shared(*at).fetch_add(value, std::memory_order_acquire);
}

MKERNEL_HOST_DEVICE inline std::uint64_t fetch_add_acq_rel(std::uint64_t* at, std::uint64_t value) {
    return shared(*at).fetch_add(value, std::memory_order_acq_rel);
}

// Returns the value before.
MKERNEL_HOST_DEVICE inline std::uint32_t exchange_acquire(std::uint32_t* at, std::uint32_t value) {
    return shared(*at).exchange(value, std::memory_order_acquire);
}

// Returns nanoseconds on the clock of this side.
MKERNEL_HOST_DEVICE inline std::uint64_t now_ns() {
    return monotonic_ns();
}

// Pauses between two looks at a word that others change.
MKERNEL_HOST_DEVICE inline void pause() {
    yield();
}

#endif

}  // namespace mkernel::transport::near
