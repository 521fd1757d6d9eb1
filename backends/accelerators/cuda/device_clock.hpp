// A device's clock beside the host's CLOCK_MONOTONIC, which all processes of a host share: it serves to start
// work on several devices at one instant, and to measure how well that went.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backends/accelerators/cuda/clock.hpp"

namespace mkernel::cuda {

// A sample, in nanoseconds. The device's clock read `device_ns` at some time between the host's two readings.
struct ClockSample {
    std::int64_t before_ns;
    std::int64_t device_ns;
    std::int64_t after_ns;
};

// A device's clock, used by one thread at a time. Streams are the device's.
class DeviceClock {
  public:
    // CudaError.
    explicit DeviceClock(int device);
    ~DeviceClock();
    DeviceClock(const DeviceClock&) = delete;
    DeviceClock& operator=(const DeviceClock&) = delete;

    // Reads the device's clock 1 to kMostClockSamples times, after everything that is on `stream`. Returns
    // when that is done. CudaError; std::invalid_argument; std::runtime_error where the device does not
    // answer in time, also in every call after that.
    std::vector<ClockSample> read(int samples, double timeout_s, cudaStream_t stream);

    // Makes work that is put on `stream` after this start once the device's clock is `until_ns`, or after
    // `most_s` seconds of waiting. Returns at once. The previous hold must be over. CudaError.
    void hold(std::int64_t until_ns, double most_s, cudaStream_t stream);

    // Returns the device's clock at the end of the latest hold; 0 while that is not over.
    [[nodiscard]] std::int64_t passed() const;

  private:
    int device_;
    ClockWords* words_ = nullptr;
    bool silent_ = false;  // a kernel may still use the words
};

}  // namespace mkernel::cuda
