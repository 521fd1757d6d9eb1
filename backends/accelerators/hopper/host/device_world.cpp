#include "backends/accelerators/hopper/host/device_world.hpp"

namespace mkernel::hopper {

Region region_of(const DeviceWorld& world) {
    Region region{};
    for (std::size_t rank = 0; rank < world.regions.size(); ++rank) {
        region.base[rank] = reinterpret_cast<char*>(world.regions[rank]);
    }
    region.rank = world.rank;
    region.world = static_cast<int>(world.regions.size());
    return region;
}

WaitLimits limits_of(const DeviceWorld& world) {
    return {reinterpret_cast<HostControl*>(world.control),
            static_cast<std::uint64_t>(world.timeout_s * 1e9), world.call};
}

}  // namespace mkernel::hopper
