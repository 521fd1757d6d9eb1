// The world as kernels see it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda {

// The world of one call: the workspaces of this node's ranks mapped on this device, the way to the other
// ranks, and the limits of waits.
struct DeviceWorld {
    std::vector<std::uint64_t> workspaces;  // by rank; 0: of another node
    Network network;
    int rank;
    std::uint64_t control;  // address of the HostControl, for the device
    double timeout_s;
    std::uint32_t call;
};

// Returns the kernels' view of it, which has room for kMaxRanks workspaces.
inline Workspace workspace_of(const DeviceWorld& world) {
    Workspace workspace{};
    for (std::size_t rank = 0; rank < world.workspaces.size(); ++rank) {
        workspace.base[rank] = reinterpret_cast<char*>(world.workspaces[rank]);
    }
    workspace.rank = world.rank;
    workspace.world = static_cast<int>(world.workspaces.size());
    while (!workspace.near(workspace.first)) ++workspace.first;
    workspace.local =
        static_cast<int>(std::count_if(world.workspaces.begin(), world.workspaces.end(),
                                       [](std::uint64_t address) { return address != 0; }));
    workspace.network = world.network;
    workspace.network.rank = world.rank;
    return workspace;
}

inline transport::WaitLimits limits_of(const DeviceWorld& world) {
    return {reinterpret_cast<transport::HostControl*>(world.control),
            static_cast<std::uint64_t>(world.timeout_s * 1e9), world.call};
}

// Returns true where another rank is on this device: copies to it need room on its multiprocessors.
inline bool shares_device(int device, const DeviceWorld& world) {
    for (int rank = 0; rank < static_cast<int>(world.workspaces.size()); ++rank) {
        const std::uint64_t workspace = world.workspaces[rank];
        if (rank != world.rank && workspace != 0 && cuda::device_of(workspace) == device)
            return true;
    }
    return false;
}

// Returns the places, in bytes into new memory, at which the number of the first call is written.
inline std::vector<std::size_t> epoch_offsets() {
    std::vector<std::size_t> offsets{offsetof(Control, state) +
                                     offsetof(transport::CallState, epoch)};
    for (int copy = 0; copy < kEpochCopies; ++copy) {
        offsets.push_back(offsetof(Control, epochs) + copy * sizeof(std::uint64_t));
    }
    return offsets;
}

}  // namespace mkernel::cuda
