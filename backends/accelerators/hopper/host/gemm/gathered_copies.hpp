// Copies of gathered rows and their scales out of the workspace, for calls that return them.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"

namespace mkernel::hopper {

// A plan's copies. They follow the kernels of a call, and end once every rank has copied
// (kernels/rendezvous.hpp).
class GatheredCopies {
  public:
    // `row_bytes`, `scale_bytes`: of all rows of one rank, and of their scales.
    GatheredCopies(int device, DeviceWorld world, std::uint64_t row_bytes,
                   std::uint64_t scale_bytes);

    // Queues the copies to `rows` and `scales`; 0: the call does not return them.
    void start(const CallOnce& call, std::uint64_t rows, std::uint64_t scales);

  private:
    int device_;
    DeviceWorld world_;
    std::uint64_t row_bytes_, scale_bytes_;
};

}  // namespace mkernel::hopper
