// Bulk copies of plain bytes between global and shared memory, no tensor map.
//
// Addresses are multiples of 16, so are sizes; global memory may be this GPU's, a peer's or pinned
// host memory. A load completes on an mbarrier that was set to expect its bytes. Stores complete by groups of
// the issuing thread (close_group, wait_groups_read, wait_groups of tensor.cuh): after `wait_groups_read` the
// shared memory may be used again, after `wait_groups` the bytes are written. Both are accesses of the async
// proxy: see fence_async_proxy in sync.cuh.
#pragma once

#include "backends/accelerators/cuda/ptx/tensor.cuh"

namespace mkernel::cuda::ptx {

__device__ inline void load_bytes(void* to_shared, const void* from, std::uint32_t nbytes,
                                  Mbarrier* done) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to_shared)),
        "l"(from), "r"(nbytes), "r"(shared_address(done))
        : "memory");
}

__device__ inline void store_bytes(void* to, const void* from_shared, std::uint32_t nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from_shared)), "r"(nbytes)
                 : "memory");
}

// Requests bytes of global memory for L2; nothing waits for them. Devices without bulk copies are asked for each line,
// but perhaps the last one.
__device__ inline void prefetch_bytes(std::uint64_t at, std::uint32_t nbytes) {
    if constexpr (kSinceHopper) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(nbytes)
                     : "memory");
    } else {
        for (const std::uint64_t end = at + nbytes; at < end; at += 128) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
        }
    }
}

}  // namespace mkernel::cuda::ptx
