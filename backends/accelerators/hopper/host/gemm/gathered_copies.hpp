// Copies of gathered rows and their scales out of the workspace, for calls that return them.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"
#include "backends/accelerators/hopper/transfer/transfer.hpp"

namespace mkernel::hopper {

// A plan's copies. They follow the kernels of a call, and end once every rank has copied, so that the next call
// may write the workspace.
class GatheredCopies {
  public:
    // `row_bytes`, `scale_bytes`: of all rows of one rank, and of their scales.
    GatheredCopies(int device, DeviceWorld world, std::uint64_t row_bytes,
                   std::uint64_t scale_bytes, transfer::Engine engine, std::uint32_t blocks);

    // Queues the copies to `rows` and `scales`; 0: the call does not return them.
    void start(const CallOnce& call, std::uint64_t rows, std::uint64_t scales);

  private:
    // Copies one rank's `own` bytes and the others', which lie at `landed`, to `whole`.
    void copy(std::uint64_t own, std::uint64_t landed, std::uint64_t bytes, std::uint64_t whole,
              cudaStream_t stream) const;

    int device_;
    DeviceWorld world_;
    std::uint64_t row_bytes_, scale_bytes_;
    transfer::Engine engine_;
    transfer::Effort effort_;
};

}  // namespace mkernel::hopper
