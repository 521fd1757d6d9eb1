// The devices and ports of a verbs provider, and the choice of the GID to use on a port.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/nics/verbs/loader.hpp"

namespace mkernel::nics::verbs {

struct DeviceInfo {
    std::string name;
    std::string sysfs;  // the device's folder under /sys/class/infiniband, or empty
    std::string firmware;
    std::uint32_t vendor_id = 0;
    std::uint8_t port = 1;
    bool active = false;
    std::string state;       // DOWN, INIT, ARMED, ACTIVE, ...
    std::string link_layer;  // InfiniBand, Ethernet or Unspecified
    double speed_gbps = 0;   // 0: not known
    std::uint32_t mtu = 0;   // bytes
    int gid_index = -1;      // of the GID that would be used; -1: `gid` says why there is none
    std::string gid;
    std::string gid_type;  // IB, RoCE v1 or RoCE v2
    bool dmabuf = false;   // registers dmabufs
};

// Returns every port of every device that opens. Throws SetupError where there are devices and none opens.
std::vector<DeviceInfo> list_devices(const Verbs& verbs);

// Opens a device by name. Throws SetupError, naming the devices there are.
std::shared_ptr<ibv_context> open_device(std::shared_ptr<const Verbs> verbs,
                                         const std::string& name);

struct GidChoice {
    ::ibv_gid gid{};
    int index = 0;
    std::uint32_t type = IBV_GID_TYPE_IB;
};

// Returns the GID of a port: entry `wanted` where given. Otherwise, on Ethernet, RoCE v2 before v1, and there
// IPv4-mapped before global IPv6 before link-local; on InfiniBand entry 0. Throws SetupError.
GidChoice choose_gid(const Verbs& verbs, ibv_context* context, std::uint8_t port,
                     const ibv_port_attr& attributes, std::optional<int> wanted);

// Returns true where the device registers dmabufs: tested with a descriptor that is none.
bool registers_dmabufs(const Verbs& verbs, ibv_pd* pd);

std::string gid_text(const ::ibv_gid& gid);  // 32 hexadecimal digits
std::optional<::ibv_gid> parse_gid(const std::string& text);

}  // namespace mkernel::nics::verbs
