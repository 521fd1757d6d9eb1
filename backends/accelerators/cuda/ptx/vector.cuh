// Accesses of 16 bytes at once that bypass the L1 cache: bytes that cross NVLink or PCIe are used once.
//
// They are weak accesses: ordered against other GPUs by the acquire and release operations around them.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"

namespace mkernel::cuda::ptx {

__device__ inline uint4 load_16(const void* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Loads a value that another GPU wrote before this thread's block was signalled.
__device__ inline float load_arrived(const float* from) {
    float v;
    asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}

__device__ inline void store_16(void* to, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Copies 8 bytes into shared memory, zeros where `there` is false; the copy is done when this thread has
// waited.
__device__ inline void copy_8_ahead(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 8 : 0)
                 : "memory");
}
__device__ inline void wait_copies_ahead() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace mkernel::cuda::ptx
