// The owner of a HostControl, by which this rank's running kernels are made to give up, and in which they
// record what they waited for in vain.
#pragma once

#include <cstdint>
#include <utility>

#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

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

    // Returns true when a kernel has recorded a time-out. No more than a read; any thread.
    [[nodiscard]] bool failed() const {
        return transport::abort_code(control_->record) != transport::AbortCode::none;
    }
    // Returns the first time-out that a kernel recorded; (none, ...) where none did. Any thread.
    [[nodiscard]] std::pair<transport::AbortCode, transport::Diagnosis> outcome() const;

  private:
    transport::HostControl* control_ = nullptr;
};

}  // namespace mkernel::hopper
