// What the kernels that have attention's core in them are given of it.
#pragma once

#include "backends/accelerators/hopper/kernels/attention_core.hpp"

namespace mkernel::hopper::attention {

// CudaError; std::invalid_argument.
CoreArgs core_args(const Core& core);

}  // namespace mkernel::hopper::attention
