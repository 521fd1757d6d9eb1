#include "backends/accelerators/cuda/device.hpp"

namespace mkernel::cuda {

std::vector<DeviceInfo> devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<DeviceInfo> found;
    for (int index = 0; index < count; ++index) {
        const auto call = [index](const char* name) {
            return std::string(name) + "(" + std::to_string(index) + ")";
        };
        cudaDeviceProp properties{};
        check(cudaGetDeviceProperties(&properties, index), call("cudaGetDeviceProperties"));
        char pci[32] = "";
        check(cudaDeviceGetPCIBusId(pci, sizeof(pci), index), call("cudaDeviceGetPCIBusId"));
        const auto attribute = [&](cudaDeviceAttr which) {
            int value = 0;
            check(cudaDeviceGetAttribute(&value, which, index), call("cudaDeviceGetAttribute"));
            return value;
        };
        // Two transfers a clock cycle; kHz and bits.
        const double memory_gbs = 2e-6 * attribute(cudaDevAttrMemoryClockRate) *
                                  attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
        std::vector<int> out_of_reach;
        for (int other = 0; other < count; ++other) {
            int reaches = 0;
            if (other == index) continue;
            check(cudaDeviceCanAccessPeer(&reaches, index, other), call("cudaDeviceCanAccessPeer"));
            if (reaches == 0) out_of_reach.push_back(other);
        }
        found.push_back({index, properties.name, properties.major, properties.minor,
                         properties.multiProcessorCount, attribute(cudaDevAttrClockRate) / 1e3,
                         memory_gbs, pci, attribute(cudaDevAttrMpsEnabled) != 0,
                         std::move(out_of_reach)});
    }
    return found;
}

std::pair<int, int> versions() {
    int driver = 0;
    int runtime = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    return {driver, runtime};
}

int device_of(std::uint64_t address) {
    const OutsideCapture outside;
    cudaPointerAttributes found{};
    check(cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address)),
          "cudaPointerGetAttributes");
    return found.device;
}

}  // namespace mkernel::cuda
