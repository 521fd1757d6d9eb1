// The place of a call's `out`, for the kernels of all ranks of a node (device/landing.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/accelerators/cuda/device/landing.cuh"
#include "backends/accelerators/cuda/output_memory.hpp"

namespace mkernel::cuda {

// The places that calls of one plan publish for their outputs of `bytes`. `memory`: null where the plan's
// calls publish none, which is the same on all ranks.
class Outputs {
  public:
    Outputs() = default;
    Outputs(std::shared_ptr<const cuda::OutputMemory> memory, int world, std::size_t bytes);

    // Returns the landings of a call whose own output is there.
    [[nodiscard]] Landings landings(std::uint64_t out) const;

  private:
    std::shared_ptr<const cuda::OutputMemory> memory_;
    int world_ = 1;
    std::size_t bytes_ = 0;
};

}  // namespace mkernel::cuda
