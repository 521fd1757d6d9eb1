// The operations of memory order that are specific to this architecture, one PTX instruction each, beside
// transport/atomics.hpp.
//
// Bulk copies (the async proxy) need `fence_async_proxy` on top of acquires and releases: after an acquire
// and before a bulk load of the data, and after generic writes that a bulk store reads.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/since_hopper.cuh"

namespace mkernel::cuda::ptx {

// Orders generic accesses and bulk copies of this thread, in both directions, all state spaces.
__device__ inline void fence_async_proxy() {
    if constexpr (kSinceHopper) asm volatile("fence.proxy.async;" ::: "memory");
}

// Does the same for shared memory only.
__device__ inline void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A grid that is launched to start early (programmatic stream serialization) may read what the grid
// before it on its stream wrote, and write what that one reads, only after this.
__device__ inline void wait_for_grid_before() {
    if constexpr (kSinceHopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next grid on the stream start early once all blocks have come here, or to their end.
__device__ inline void let_next_grid_start() {
    if constexpr (kSinceHopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <int kRegisters>
__device__ inline void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes kThreads threads of the block meet, all of whole warps, that name the same barrier; 0 is
// __syncthreads'.
template <int kBarrier, int kThreads>
__device__ inline void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Returns true in one thread of the (converged) warp.
__device__ inline bool elect_one() {
    std::uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(elected));
    return elected != 0;
}

}  // namespace mkernel::cuda::ptx
