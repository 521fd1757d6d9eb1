// The command FIFO of a NIC session for kernels of a device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/memory.hpp"
#include "backends/cuda/stream_ops.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/fifo_host.hpp"

namespace mkernel::cuda {

// The one device that pushes to a FIFO, from here to the end of this object's life: its ring is registered
// with the device, its tickets lie there. No kernel may push any more then.
class DeviceFifo {
  public:
    // `fifo`: what the session gives as its FIFO, the address of a transport::FifoHandle, which outlives
    // this. CudaError; std::invalid_argument where there is no FIFO, or a device pushes to it already.
    DeviceFifo(std::uint64_t fifo, int device);
    ~DeviceFifo();
    DeviceFifo(const DeviceFifo&) = delete;
    DeviceFifo& operator=(const DeviceFifo&) = delete;

    // For kernels, by value.
    [[nodiscard]] const transport::FifoDevice& handle() const { return handle_; }

  private:
    void open(int device);

    const transport::FifoHandle* fifo_;
    std::optional<MappedPages> pages_;
    std::optional<DeviceMemory> tickets_;
    transport::FifoDevice handle_;
};

}  // namespace mkernel::cuda
