// Where a call's `out` lies, for the kernels of all ranks of a node (device/landing.cuh).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/accelerators/hopper/device/landing.cuh"
#include "backends/cuda/output_memory.hpp"

namespace mkernel::hopper {

// What calls of one plan tell of their outputs of `bytes`. `memory`: null where the plan's calls tell nothing,
// which is the same on all ranks.
class Outputs {
  public:
    Outputs() = default;
    Outputs(std::shared_ptr<const cuda::OutputMemory> memory, int world, std::size_t bytes);

    // Of a call whose own output is there.
    [[nodiscard]] Landings landings(std::uint64_t out) const;

  private:
    std::shared_ptr<const cuda::OutputMemory> memory_;
    int world_ = 1;
    std::size_t bytes_ = 0;
};

}  // namespace mkernel::hopper
