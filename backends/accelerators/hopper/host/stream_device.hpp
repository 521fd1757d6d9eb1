// The device that a stream belongs to.
#pragma once

#include "backends/accelerators/hopper/host/device.hpp"

namespace mkernel::hopper {

// Of no stream (null): the calling thread's device.
inline int device_of(cudaStream_t stream) {
    int device = 0;
    if (stream == nullptr) {
        check(cudaGetDevice(&device), "cudaGetDevice");
    } else {
        check(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice");
    }
    return device;
}

}  // namespace mkernel::hopper
