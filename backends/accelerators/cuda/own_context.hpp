// A context beside the device's primary one, which everything else in the process shares. Memory that is
// mapped for the device is mapped in both. It lasts as long as the process.
#pragma once

#include <cuda.h>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

class OwnContext {
  public:
    explicit OwnContext(int device) : device_(device) {
        const DeviceScope initialised(device);
        CUdevice found = 0;
        check(driver().device_get(&found, device), "cuDeviceGet");
#if CUDA_VERSION >= 13000
        check(driver().ctx_create(&context_, nullptr, 0, found), "cuCtxCreate");
#else
        check(driver().ctx_create(&context_, 0, found), "cuCtxCreate");
#endif
        CUcontext current = nullptr;  // creating it made it so
        check(driver().ctx_pop_current(&current), "cuCtxPopCurrent");
    }
    OwnContext(const OwnContext&) = delete;
    OwnContext& operator=(const OwnContext&) = delete;

    [[nodiscard]] int device() const { return device_; }

    // Puts driver calls of this thread into the context until the end of the scope, outside of the user's
    // captures. Calls of the runtime belong elsewhere.
    class Scope {
      public:
        explicit Scope(const OwnContext& own) {
            check(driver().ctx_push_current(own.context_), "cuCtxPushCurrent");
            driver().thread_exchange_stream_capture_mode(&mode_);
        }
        ~Scope() {
            driver().thread_exchange_stream_capture_mode(&mode_);
            CUcontext left = nullptr;
            driver().ctx_pop_current(&left);
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    };

  private:
    int device_;
    CUcontext context_ = nullptr;
};

}  // namespace mkernel::cuda
