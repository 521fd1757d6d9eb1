// What a rank keeps of its calls in memory of its device, so that nothing of a call's number comes from the
// host at launch: a replayed graph counts as well as a launch does (signal.hpp says why that matters).
// Kernels of all plans of a world share one.
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"

namespace mkernel::transport {

struct CallState {
    std::uint64_t epoch;  // number of the running call; the owner sets it to 1 before the first
    std::uint32_t blocks_done;  // of the running call; back to 0 at its end
    std::uint32_t failed;       // 1: a wait of this rank failed; all others give up at once

#ifdef __CUDACC__
    // One thread of every block, once, when the block is done with the call and its accesses are ordered
    // before by a fence. True in the last block, which ends the call.
    __device__ bool is_last_block() {
        return atomicAdd(&blocks_done, 1u) == gridDim.x * gridDim.y * gridDim.z - 1;
    }
    // After all else of the running call `number` on this rank: that thread.
    __device__ void move_on(std::uint64_t number) {
        blocks_done = 0;
        epoch = number + 1;
    }
#endif
};

}  // namespace mkernel::transport
