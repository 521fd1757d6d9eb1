// In place of the transport's: threads of the host stand for those of a GPU, and have its clock.
#pragma once

#include <time.h>

#include <cstdint>

namespace mkernel::transport {

inline std::uint64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
}
inline std::uint64_t global_ns() {
    return monotonic_ns();
}

}  // namespace mkernel::transport
