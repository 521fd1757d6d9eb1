// The owner of a HostControl, by which this rank's running kernels are made to give up, and in which they
// record what they waited for in vain.
#pragma once

#include <cstdint>

#include "backends/transport/host_control.hpp"

namespace mkernel::cuda {

class ControlBlock {
  public:
    // Allocates pinned host memory that kernels of every device of this process can address.
    ControlBlock();
    ControlBlock(const ControlBlock&) = delete;
    ControlBlock& operator=(const ControlBlock&) = delete;
    // Frees it; no kernel may use it any more.
    ~ControlBlock();

    // Returns the argument of kernels: a HostControl*.
    [[nodiscard]] std::uint64_t address() const {
        return reinterpret_cast<std::uint64_t>(control_);
    }

    // Ends every wait of a running kernel soon after, and those of later launches at once. Any thread.
    void abort(transport::AbortCode code) const;

    // Returns the address of the AbortRecord to which kernels write their first time-out.
    [[nodiscard]] std::uint64_t record() const {
        return reinterpret_cast<std::uint64_t>(&control_->record);
    }

  private:
    transport::HostControl* control_ = nullptr;
};

}  // namespace mkernel::cuda
