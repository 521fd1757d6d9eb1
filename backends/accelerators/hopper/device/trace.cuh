// Times of a call's blocks by the device's clock, where the build has MKERNEL_TRACE; without it nothing of
// this is in a kernel. bench/kernel_trace.py draws it.
//
// Threads of a block write the times of its marks to shared memory, and one thread stores them at the end of
// the call, in a ring of the last `calls` epochs: [calls, blocks, 1 + marks] 64-bit words, of which the first
// is the epoch. A mark that is made more than once keeps its last time.
#pragma once

#include <cstdint>

#include "backends/transport/clock.hpp"

namespace mkernel::hopper {

#ifdef MKERNEL_TRACE
inline constexpr bool kTraced = true;
#else
inline constexpr bool kTraced = false;
#endif

// The ring; nothing is traced where it is null.
struct Trace {
    std::uint64_t* words = nullptr;
    std::uint32_t calls = 0;
};

#ifdef __CUDACC__
template <int kMarks>
struct BlockTrace {
    std::uint64_t at[kTraced ? kMarks : 1];

    __device__ void mark(int which) {
        if constexpr (kTraced) at[which] = transport::global_ns();
    }
    // Stores the marks' times. Called by one thread of the block, after all marks.
    __device__ void store(const Trace& trace, std::uint64_t epoch) const {
        if constexpr (kTraced) {
            if (trace.words == nullptr) return;
            std::uint64_t* const to =
                trace.words + (epoch % trace.calls * gridDim.x + blockIdx.x) * (1 + kMarks);
            to[0] = epoch;
            for (int which = 0; which < kMarks; ++which) to[1 + which] = at[which];
        }
    }
};
#endif

}  // namespace mkernel::hopper
