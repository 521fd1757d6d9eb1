// The arguments of the kernels that contain attention's core.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.hpp"

namespace mkernel::hopper::attention {

// CudaError; std::invalid_argument.
CoreArgs core_args(const Core& core);

}  // namespace mkernel::hopper::attention
