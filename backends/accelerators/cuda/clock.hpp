// The device's clock (`globaltimer`): reads of it from the host, and waits for it on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mkernel::cuda {

inline constexpr int kMostClockSamples = 64;

// Pinned host memory that the host and the kernels below share. One cache line a direction.
struct ClockWords {
    alignas(128) std::uint64_t asked;                      // the host's: samples asked for so far
    alignas(128) std::uint64_t stamps[kMostClockSamples];  // the device's: its clock, never 0
    alignas(128) std::uint64_t passed;                     // the device's: when the hold ended
};

// Answers `samples` requests of the host: the n-th stamp is the clock once `asked` is at least n.
// Ends after `timeout_ns` at the latest. On the current device's `stream`. CudaError.
void answer_clock(ClockWords* words, int samples, std::uint64_t timeout_ns, cudaStream_t stream);

// Keeps the stream busy until the clock is at least `until_ns`, but no longer than `most_ns`, and
// stores the clock at the end to `passed`. On the current device's `stream`. CudaError.
void hold_until(ClockWords* words, std::uint64_t until_ns, std::uint64_t most_ns,
                cudaStream_t stream);

}  // namespace mkernel::cuda
