// Bulk tensor copies (TMA): boxes of a tensor of 2 to 5 dimensions between global and shared memory.
//
// Coordinates are elements, innermost first; elements outside of the tensor are read as zero and not written.
// Loads complete on an mbarrier (the whole box counts, outside or not); stores complete by groups of the
// issuing thread.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"
#include "backends/accelerators/cuda/ptx/since_hopper.cuh"

namespace mkernel::cuda::ptx {

__device__ inline void load_box(void* to, const CUtensorMap* map, Mbarrier* done, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y)
        : "memory");
}

// Prefetches a box into L2 alone, where all of the device's writes are seen too: allowed before others have
// written it.
__device__ inline void prefetch_box(const CUtensorMap* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x),
                 "r"(y)
                 : "memory");
}

// Loads a box to the same place in every block of the cluster that `blocks` names; the load completes on each
// block's own barrier.
__device__ inline void load_box_to(std::uint16_t blocks, void* to, const CUtensorMap* map,
                                   Mbarrier* done, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

__device__ inline void load_box(void* to, const CUtensorMap* map, Mbarrier* done, int x, int y,
                                int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void load_box_to(std::uint16_t blocks, void* to, const CUtensorMap* map,
                                   Mbarrier* done, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

__device__ inline void load_box(void* to, const CUtensorMap* map, Mbarrier* done, int x, int y,
                                int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ inline void load_box(void* to, const CUtensorMap* map, Mbarrier* done, int x, int y,
                                int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(done)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const void* from, int x, int y, int z,
                                 int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ inline void store_box(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void close_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kOpen of this thread's groups have not yet read their shared memory.
template <int kOpen>
__device__ inline void wait_groups_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kOpen) : "memory");
}

// Waits until at most kOpen of this thread's groups are not complete, writes included.
template <int kOpen>
__device__ inline void wait_groups() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kOpen) : "memory");
}

__device__ inline std::uint32_t block_in_cluster() {
    std::uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline std::uint32_t blocks_of_cluster() {
    std::uint32_t count;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

// Where there are no clusters, a block is one of its own.
__device__ inline void cluster_barrier() {
    if constexpr (kSinceHopper) {
        asm volatile(
            "barrier.cluster.arrive.release.aligned;\n"
            "barrier.cluster.wait.acquire.aligned;" ::
                : "memory");
    } else {
        __syncthreads();
    }
}

// The two halves of a cluster's barrier, called by all threads of a warp together: data that was written
// before `arrive` is seen after `wait`.
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns four floats of the shared memory of block `block` of the cluster, from the place that is `at` in
// this block's.
__device__ inline float4 load_of_block(const float* at, std::uint32_t block) {
    float4 four;
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
        : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
        : "r"(shared_address(at)), "r"(block)
        : "memory");
    return four;
}

}  // namespace mkernel::cuda::ptx
