#include "backends/accelerators/hopper/host/device.hpp"

namespace mkernel::hopper {

std::vector<DeviceInfo> devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<DeviceInfo> found;
    for (int index = 0; index < count; ++index) {
        const std::string which = "(" + std::to_string(index) + ")";
        cudaDeviceProp properties{};
        check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties" + which);
        char pci[32] = "";
        check(cudaDeviceGetPCIBusId(pci, sizeof(pci), index), "cudaDeviceGetPCIBusId" + which);
        found.push_back({index, properties.name, properties.major, properties.minor,
                         properties.multiProcessorCount, properties.totalGlobalMem, pci});
    }
    return found;
}

Versions versions() {
    Versions found{};
    check(cudaDriverGetVersion(&found.driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&found.runtime), "cudaRuntimeGetVersion");
    return found;
}

bool can_access(int from, int to) {
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, from, to),
          "cudaDeviceCanAccessPeer(" + std::to_string(from) + ", " + std::to_string(to) + ")");
    return can != 0;
}

int device_of(std::uint64_t address) {
    const OutsideCapture outside;
    cudaPointerAttributes found{};
    check(cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address)),
          "cudaPointerGetAttributes");
    return found.device;
}

}  // namespace mkernel::hopper
