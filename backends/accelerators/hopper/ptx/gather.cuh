// Copies from global into shared memory by ordinary threads, whose addresses are their own: bulk copies cannot
// gather. Those of 16 bytes bypass the L1 cache. They are accesses of the generic proxy: before wgmma reads
// what they wrote, the thread that made them fences (fence_async_shared) after the wait.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper::ptx {

// Copies 16 bytes, of which `nbytes` come from `from`, 0 or 16; the others are zeros.
__device__ inline void copy_16(std::uint32_t to_shared, const void* from, std::uint32_t nbytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
                 "r"(nbytes)
                 : "memory");
}

// Copies 4 bytes through the L1 cache, which then holds those that follow.
__device__ inline void copy_4(void* to_shared, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to_shared)),
                 "l"(from)
                 : "memory");
}

// Arrives at the barrier once all copies of this thread so far have written shared memory. It is one of the
// arrivals that the barrier was initialised for.
__device__ inline void arrive_after_copies(Mbarrier* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier->word))
        : "memory");
}

__device__ inline void close_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kOpen of this thread's groups have not yet written shared memory.
template <int kOpen>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

}  // namespace mkernel::hopper::ptx
