// The words by which the host and the kernels of a rank inform each other: one block of pinned, mapped host
// memory.
#pragma once

#include <cstdint>

#include "backends/transport/diagnosis.hpp"

namespace mkernel::transport {

// The host writes `abort` (an AbortCode; kernels look for non-zero), the device the rest.
struct HostControl {
    std::uint32_t abort;
    std::uint32_t reserved[15];
    AbortRecord record;
};

// The limits of a kernel's waits.
struct WaitLimits {
    HostControl* host;  // device address
    std::uint64_t timeout_ns;
    std::uint32_t call;  // number of the call in its world, for the diagnosis
};

}  // namespace mkernel::transport
