// The clocks that deadlines of waits are on, in nanoseconds. They are not comparable with each other.
#pragma once

#include <time.h>

#include <cstdint>

namespace mkernel::transport {

// Returns CLOCK_MONOTONIC's time, the same in all processes of a host.
inline std::uint64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
}

#ifdef __CUDACC__
// Returns the time of a GPU's clock: the same on all multiprocessors of a GPU, coarse (about 1 us), another
// on each GPU.
__device__ inline std::uint64_t global_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#endif

}  // namespace mkernel::transport
