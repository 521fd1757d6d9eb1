// The error of an instruction that hardware would punish.
#pragma once

#include <stdexcept>

namespace mkernel::ascend::sim {

// Names rank, core, pipe, instruction, the buffer's range and the line of the kernel's source.
class IsaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace mkernel::ascend::sim
