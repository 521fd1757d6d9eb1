// One rank's way to ranks of other nodes, for the kernels of its device; it lives as long as the world's
// NIC session.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/device/network.cuh"
#include "backends/accelerators/cuda/device_fifo.hpp"
#include "backends/accelerators/cuda/memory.hpp"
#include "backends/accelerators/cuda/stream_ops.hpp"

namespace mkernel::cuda {

class DeviceNetwork {
  public:
    // `fifo`: the session's; `pad`: the rank's signal pad, of at least kNetworkWords. `ordered`: the NIC
    // never sends a put twice. CudaError; std::invalid_argument, as cuda::DeviceFifo.
    DeviceNetwork(int device, std::uint64_t fifo, std::uint64_t pad, bool ordered);

    // Returns the kernels' argument for using the area at `area`, `offset` bytes into a region on every rank.
    // No kernel may use it once this object has ended.
    [[nodiscard]] Network of(std::uint64_t area, bool staged, std::uint32_t region,
                             std::uint64_t offset) const;

  private:
    const transport::Word* words_;
    cuda::MappedPages pages_;  // that hold the words
    cuda::DeviceFifo fifo_;
    cuda::DeviceMemory counts_;  // kNetworkWords expected ones
    bool ordered_;
};

}  // namespace mkernel::cuda
