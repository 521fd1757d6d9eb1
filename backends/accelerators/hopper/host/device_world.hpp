// The world as kernels see it.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/accelerators/hopper/device/host_control.hpp"
#include "backends/accelerators/hopper/device/workspace.cuh"

namespace mkernel::hopper {

// The world of one call: every rank's workspace mapped on this device, and how to wait.
struct DeviceWorld {
    std::vector<std::uint64_t> workspaces;  // by rank
    int rank;
    std::uint64_t control;  // address of the HostControl, for the device
    double timeout_s;
    std::uint32_t call;
};

// What kernels are given of it. At most kMaxRanks workspaces.
Workspace workspace_of(const DeviceWorld& world);
WaitLimits limits_of(const DeviceWorld& world);

}  // namespace mkernel::hopper
