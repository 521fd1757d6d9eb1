#include "backends/nics/verbs/devices.hpp"

#include <cerrno>
#include <cstring>
#include <map>

#include "backends/nics/nic.hpp"

namespace mkernel::nics::verbs {
namespace {

struct DeviceList {
    explicit DeviceList(const Verbs& verbs)
        : verbs(verbs), devices(verbs.get_device_list(&count)) {}
    ~DeviceList() {
        if (devices != nullptr) verbs.free_device_list(devices);
    }
    DeviceList(const DeviceList&) = delete;
    DeviceList& operator=(const DeviceList&) = delete;

    const Verbs& verbs;
    int count = 0;
    ibv_device** devices;
};

const char* link_layer_name(std::uint8_t layer) {
    if (layer == IBV_LINK_LAYER_INFINIBAND) return "InfiniBand";
    if (layer == IBV_LINK_LAYER_ETHERNET) return "Ethernet";
    return "Unspecified";
}

const char* state_name(ibv_port_state state) {
    static constexpr const char* kNames[] = {"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "DEFER"};
    return state <= IBV_PORT_ACTIVE_DEFER ? kNames[state] : "unknown";
}

const char* gid_type_name(std::uint32_t type) {
    return type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "RoCE v1";
}

double speed_gbps(const ibv_port_attr& port) {
    static const std::map<int, double> kLanes{{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}};
    static const std::map<int, double> kLaneGbps{{1, 2.5}, {2, 5},   {4, 10},   {8, 10}, {16, 14},
                                                 {32, 25}, {64, 50}, {128, 100}};  // SDR to NDR
    const auto lanes = kLanes.find(port.active_width);
    const auto gbps = kLaneGbps.find(port.active_speed);
    return lanes != kLanes.end() && gbps != kLaneGbps.end() ? lanes->second * gbps->second : 0;
}

bool zero(const ::ibv_gid& gid) {
    static const ::ibv_gid none{};
    return std::memcmp(gid.raw, none.raw, sizeof(none.raw)) == 0;
}

// Returns a score; higher is better, see choose_gid.
int score(const ::ibv_gid& gid, std::uint32_t type) {
    static constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    int family = 1;
    if (std::memcmp(gid.raw, kMapped, sizeof(kMapped)) == 0) {
        family = 3;
    } else if (gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80) {
        family = 0;
    }
    return (type == IBV_GID_TYPE_ROCE_V2 ? 10 : 0) + family;
}

bool read_gid(const Verbs& verbs, ibv_context* context, std::uint8_t port, int index,
              ibv_gid_entry& entry) {
    std::memset(&entry, 0, sizeof(entry));
    if (verbs.query_gid_ex != nullptr &&
        verbs.query_gid_ex(context, port, static_cast<std::uint32_t>(index), &entry, 0,
                           sizeof(entry)) == 0) {
        return !zero(entry.gid);
    }
    // Without the extended query the type is unknown: RoCE v1 is the cautious reading.
    entry.gid_type = IBV_GID_TYPE_ROCE_V1;
    return verbs.query_gid(context, port, index, &entry.gid) == 0 && !zero(entry.gid);
}

std::string does_not_open(const std::string& name, int error) {
    return "RDMA device " + name + " does not open: " + std::strerror(error) +
           "; check the rights on /dev/infiniband and the limits of locked memory and open files";
}

}  // namespace

bool registers_dmabufs(const Verbs& verbs, ibv_pd* pd) {
    if (verbs.reg_dmabuf_mr == nullptr) return false;
    ibv_mr* mr = verbs.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0);
    if (mr == nullptr) return errno == EBADF;
    verbs.dereg_mr(mr);
    return false;
}

std::vector<DeviceInfo> list_devices(const Verbs& verbs) {
    std::vector<DeviceInfo> found;
    std::string unopened;
    const DeviceList list(verbs);
    for (int i = 0; i < list.count; ++i) {
        ibv_context* context = verbs.open_device(list.devices[i]);
        if (context == nullptr) {
            unopened = does_not_open(verbs.get_device_name(list.devices[i]), errno);
            continue;
        }
        ibv_device_attr device{};
        if (verbs.query_device(context, &device) == 0) {
            ibv_pd* pd = verbs.alloc_pd(context);
            const bool dmabuf = pd != nullptr && registers_dmabufs(verbs, pd);
            if (pd != nullptr) verbs.dealloc_pd(pd);
            for (int port = 1; port <= device.phys_port_cnt; ++port) {
                ibv_port_attr attributes{};
                const auto number = static_cast<std::uint8_t>(port);
                if (verbs.query_port(context, number, &attributes) != 0) continue;
                DeviceInfo info;
                info.name = verbs.get_device_name(list.devices[i]);
                info.sysfs = list.devices[i]->ibdev_path;
                info.firmware.assign(device.fw_ver, strnlen(device.fw_ver, sizeof(device.fw_ver)));
                info.vendor_id = device.vendor_id;
                info.port = number;
                info.active = attributes.state == IBV_PORT_ACTIVE;
                info.link_layer = link_layer_name(attributes.link_layer);
                info.speed_gbps = speed_gbps(attributes);
                info.state = state_name(attributes.state);
                info.mtu = 128u << static_cast<unsigned>(attributes.active_mtu);
                info.dmabuf = dmabuf;
                try {
                    const GidChoice gid =
                        choose_gid(verbs, context, number, attributes, std::nullopt);
                    info.gid_index = gid.index;
                    info.gid = gid_text(gid.gid);
                    const bool ethernet = attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
                    info.gid_type = ethernet ? gid_type_name(gid.type) : "IB";
                } catch (const SetupError& why) {
                    info.gid = why.what();
                }
                found.push_back(std::move(info));
            }
        }
        verbs.close_device(context);
    }
    if (found.empty() && !unopened.empty()) throw SetupError(unopened);
    return found;
}

std::shared_ptr<ibv_context> open_device(std::shared_ptr<const Verbs> verbs,
                                         const std::string& name) {
    const DeviceList list(*verbs);
    std::string known;
    for (int i = 0; i < list.count; ++i) {
        const std::string each = verbs->get_device_name(list.devices[i]);
        if (each == name) {
            ibv_context* context = verbs->open_device(list.devices[i]);
            if (context == nullptr) {
                throw SetupError(does_not_open(name, errno));
            }
            return {context, [verbs](ibv_context* open) { verbs->close_device(open); }};
        }
        known += (known.empty() ? "" : ", ") + each;
    }
    throw SetupError("no RDMA device named " + name + " in " + verbs->library().name() +
                     "; there " + (known.empty() ? "are none" : "is: " + known));
}

GidChoice choose_gid(const Verbs& verbs, ibv_context* context, std::uint8_t port,
                     const ibv_port_attr& attributes, std::optional<int> wanted) {
    ibv_gid_entry entry{};
    if (wanted) {
        if (*wanted >= attributes.gid_tbl_len || !read_gid(verbs, context, port, *wanted, entry)) {
            throw SetupError("gid_index " + std::to_string(*wanted) + " holds no GID on port " +
                             std::to_string(port) + " (the table has " +
                             std::to_string(attributes.gid_tbl_len) +
                             " entries); leave gid_index unset to pick one by type");
        }
        return {entry.gid, *wanted, entry.gid_type};
    }
    if (attributes.link_layer != IBV_LINK_LAYER_ETHERNET) {
        if (!read_gid(verbs, context, port, 0, entry)) {
            throw SetupError("port " + std::to_string(port) +
                             " has no GID at index 0; is a subnet manager running?");
        }
        return {entry.gid, 0, entry.gid_type};
    }
    GidChoice best;
    int best_score = -1;
    for (int index = 0; index < attributes.gid_tbl_len; ++index) {
        if (!read_gid(verbs, context, port, index, entry)) continue;
        const int each = score(entry.gid, entry.gid_type);
        if (each > best_score) {
            best_score = each;
            best = {entry.gid, index, entry.gid_type};
        }
    }
    if (best_score < 0) {
        throw SetupError("port " + std::to_string(port) +
                         " has no GID; give its network interface an address");
    }
    return best;
}

std::string gid_text(const ::ibv_gid& gid) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t byte : gid.raw) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

std::optional<::ibv_gid> parse_gid(const std::string& text) {
    ::ibv_gid gid{};
    if (text.size() != 2 * sizeof(gid.raw)) return std::nullopt;
    for (std::size_t i = 0; i < sizeof(gid.raw); ++i) {
        int value = 0;
        for (const char c : {text[2 * i], text[2 * i + 1]}) {
            int digit = -1;
            if (c >= '0' && c <= '9') digit = c - '0';
            if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
            if (digit < 0) return std::nullopt;
            value = value * 16 + digit;
        }
        gid.raw[i] = static_cast<std::uint8_t>(value);
    }
    return gid;
}

}  // namespace mkernel::nics::verbs
