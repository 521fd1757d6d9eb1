// Barriers in shared memory that count arrivals and the bytes of bulk copies.
//
// A barrier starts in phase 0; `wait(parity)` returns once the phase of that parity has completed,
// so a fresh barrier lets wait(1) pass and holds wait(0). Waits here are for work of this cluster
// that is already under way; anything that depends on another GPU goes through transport/device_wait.cuh,
// which has a deadline, and whose failure the pipeline passes on.
#pragma once

#include <cstdint>

namespace mkernel::cuda::ptx {

__device__ inline std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

struct Mbarrier {
    std::uint64_t word;

    // Initialises the barrier. Called by one thread, before a block (or cluster) barrier that follows
    // `publish_barriers`.
    __device__ void init(std::uint32_t arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
                     "r"(arrivals)
                     : "memory");
    }

    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word))
                     : "memory");
    }

    // Arrives at the same barrier of block `block` of the cluster. It signals that reads are done; it
    // publishes no writes to another block (a release at cluster scope costs a fence of the GPU).
    __device__ void arrive_at(std::uint32_t block) {
        asm volatile(
            "{\n.reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(shared_address(&word)),
            "r"(block)
            : "memory");
    }

    // Arrives, and makes the phase wait for `bytes` of bulk copies too.
    __device__ void expect(std::uint32_t bytes) {
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
            "r"(bytes)
            : "memory");
    }

    __device__ bool try_wait(std::uint32_t parity) const {
        std::uint32_t done;
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(&word)), "r"(parity)
            : "memory");
        return done != 0;
    }

    __device__ void wait(std::uint32_t parity) const {
        while (!try_wait(parity)) {
        }
    }
};
static_assert(sizeof(Mbarrier) == 8);

// Makes the barriers visible to other blocks and bulk copies. Called after the inits, by the thread that did
// them.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace mkernel::cuda::ptx
