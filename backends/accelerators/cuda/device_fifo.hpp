// The command FIFO of a NIC session for kernels of a device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/accelerators/cuda/memory.hpp"
#include "backends/accelerators/cuda/stream_ops.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/fifo_host.hpp"

namespace mkernel::cuda {

// The one device that pushes to a FIFO during this object's life: the FIFO's ring is registered with the
// device, and its tickets lie there. When the object ends, no kernel may push any more.
class DeviceFifo {
  public:
    // Claims the FIFO. `fifo`: the session's FIFO, the address of a transport::FifoHandle, which outlives
    // this. CudaError; std::invalid_argument where there is no FIFO, or a device pushes to it already.
    DeviceFifo(std::uint64_t fifo, int device);
    ~DeviceFifo();
    DeviceFifo(const DeviceFifo&) = delete;
    DeviceFifo& operator=(const DeviceFifo&) = delete;

    // Returns the handle for kernels, which take it by value.
    [[nodiscard]] const transport::FifoDevice& handle() const { return handle_; }

  private:
    void open(int device);

    const transport::FifoHandle* fifo_;
    std::optional<MappedPages> pages_;
    std::optional<DeviceMemory> tickets_;
    transport::FifoDevice handle_;
};

}  // namespace mkernel::cuda
