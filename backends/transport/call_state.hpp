// The state of a rank's calls in memory of its device, so that nothing of a call's number comes from the host
// at launch: a replayed graph counts as well as a launch does (signal.hpp states why that matters). Kernels
// of all plans of a world share one.
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"

namespace mkernel::transport {

struct CallState {
    static constexpr std::uint32_t kGivenUp = 1, kRecorded = 2;  // of `failed`

    std::uint64_t epoch;  // number of the running call; the owner sets it to 1 before the first
    std::uint32_t blocks_done;  // of the running call; back to 0 at its end
    std::uint32_t failed;       // not 0: a wait of this rank failed; all others give up at once

    // Gives a wait up: `late` where its own time was over, otherwise because another wait gave up or the host
    // has aborted. Returns true where the caller records why, as the first that was late. Another wait may
    // have given up before it: of those that wait for room in a FIFO, one is late and stops the rest.
    MKERNEL_HOST_DEVICE bool give_up(bool late) {
        const std::uint32_t mine = late ? kGivenUp | kRecorded : kGivenUp;
#ifdef __CUDA_ARCH__
        const std::uint32_t before = atomicOr(&failed, mine);
#else
        const std::uint32_t before = shared(failed).fetch_or(mine);
#endif
        return late && (before & kRecorded) == 0;
    }

#ifdef __CUDACC__
    // Returns true in the last block, which ends the call. Called by one thread of every block, once, when
    // the block is done with the call and its accesses are ordered before by a fence.
    __device__ bool is_last_block() { return is_last(atomicAdd(&blocks_done, 1u)); }
    // Returns true for the block before which so many were counted.
    __device__ static bool is_last(std::uint32_t before) {
        return before == gridDim.x * gridDim.y * gridDim.z - 1;
    }
    // Counts a block that is done with what others may change at the end of the call; returns how many were
    // counted before it. Called by one thread of every block, once. The block that is counted last ends the call,
    // after a fence; nobody else waits for the result. The thread itself waits for it only where it looks at it: of
    // an `add` the compiler would make one for the whole warp, whose result is shuffled at once. `inc` adds 1, too.
    __device__ std::uint32_t count_block() {
#ifdef __CUDA_ARCH__
        std::uint32_t before;
        asm volatile("atom.release.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(&blocks_done), "r"(~0u >> 1)
                     : "memory");
        return before;
#else
        return shared(blocks_done).fetch_add(1, std::memory_order_release);
#endif
    }
    // Moves the epoch on, after everything else of the running call `number` on this rank. Called by that
    // thread.
    __device__ void move_on(std::uint64_t number) {
        blocks_done = 0;
        epoch = number + 1;
    }
#endif
};

}  // namespace mkernel::transport
