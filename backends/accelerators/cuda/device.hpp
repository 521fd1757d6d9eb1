// The devices of this process, and the choice of the calling thread's current one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

struct DeviceInfo {
    int index;
    std::string name;
    int major, minor;  // compute capability
    int multiprocessors;
    double clock_mhz, memory_gbs;   // at most; 0: the driver knows none
    std::string pci;                // domain:bus:device.function
    bool mps;                       // processes that share it run at once
    std::vector<int> out_of_reach;  // devices of this process whose memory it does not reach
};

// Returns the devices that this process may use, in CUDA's order. CudaError without driver or device.
std::vector<DeviceInfo> devices();

// Returns the versions of the installed driver and of the runtime in this module, as 1000 * major + 10 *
// minor; driver 0: none installed.
std::pair<int, int> versions();

// Returns the device, in CUDA's order, whose memory `address` is; also where another process allocated it.
int device_of(std::uint64_t address);

// Returns a stream from the number that Python passes for it.
inline cudaStream_t stream_at(std::uint64_t address) {
    return reinterpret_cast<cudaStream_t>(address);
}

// A scope for calls that have nothing to do with the user's captures into graphs (queries, allocations): they
// would end the capture, on any thread.
class OutsideCapture {
  public:
    OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    OutsideCapture(const OutsideCapture&) = delete;
    OutsideCapture& operator=(const OutsideCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes `device` the calling thread's until the end of the scope.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        check(cudaSetDevice(device),
              [&] { return "cudaSetDevice(" + std::to_string(device) + ")"; });
    }
    ~DeviceScope() { cudaSetDevice(before_); }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int before_ = 0;
};

}  // namespace mkernel::cuda
