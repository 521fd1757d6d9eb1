// The owner of a HostControl: how this rank's running kernels are told to give up, and how they say
// what they waited for in vain.
#pragma once

#include <cstdint>
#include <utility>

#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

class ControlBlock {
  public:
    // Pinned host memory that kernels of every device of this process can address.
    ControlBlock();
    ControlBlock(const ControlBlock&) = delete;
    ControlBlock& operator=(const ControlBlock&) = delete;
    // No kernel may use it any more.
    ~ControlBlock();

    // What kernels are given: a HostControl*.
    [[nodiscard]] std::uint64_t address() const {
        return reinterpret_cast<std::uint64_t>(control_);
    }

    // Every wait of a running kernel ends soon after; those of later launches at once. Any thread.
    void abort(transport::AbortCode code) const;

    // Whether a kernel recorded a time-out. No more than a read; any thread.
    [[nodiscard]] bool failed() const {
        return transport::abort_code(control_->record) != transport::AbortCode::none;
    }
    // The first time-out that a kernel recorded; (none, ...) where none did. Any thread.
    [[nodiscard]] std::pair<transport::AbortCode, transport::Diagnosis> outcome() const;

  private:
    transport::HostControl* control_ = nullptr;
};

}  // namespace mkernel::hopper
