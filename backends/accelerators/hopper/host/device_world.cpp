#include "backends/accelerators/hopper/host/device_world.hpp"

namespace mkernel::hopper {

Workspace workspace_of(const DeviceWorld& world) {
    Workspace workspace{};
    for (std::size_t rank = 0; rank < world.workspaces.size(); ++rank) {
        workspace.base[rank] = reinterpret_cast<char*>(world.workspaces[rank]);
    }
    workspace.rank = world.rank;
    workspace.world = static_cast<int>(world.workspaces.size());
    return workspace;
}

WaitLimits limits_of(const DeviceWorld& world) {
    return {reinterpret_cast<HostControl*>(world.control),
            static_cast<std::uint64_t>(world.timeout_s * 1e9), world.call};
}

}  // namespace mkernel::hopper
