// What two ranks in two processes tell each other over a pipe before they connect.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "backends/nics/nic.hpp"

namespace mkernel::nics::testing {

struct Hello {
    Endpoint endpoint;
    RemoteKey key;
};

inline void say(int fd, const Endpoint& e, const RemoteKey& k) {
    std::array<char, 32> gid{};
    e.gid.copy(gid.data(), gid.size());
    const std::uint64_t numbers[] = {
        e.qp_num,     e.psn,   e.lid,      e.mtu,      e.ethernet,
        k.address,    k.bytes, k.rkeys[0], e.receives, e.credit_address,
        e.credit_rkey};
    if (::write(fd, gid.data(), gid.size()) < 0 || ::write(fd, numbers, sizeof(numbers)) < 0) {
        throw std::runtime_error("pipe");
    }
}

inline Hello hear(int fd) {
    std::array<char, 32> gid{};
    std::uint64_t n[11];
    if (::read(fd, gid.data(), gid.size()) != 32 || ::read(fd, n, sizeof(n)) != sizeof(n)) {
        throw std::runtime_error("pipe");
    }
    Hello h;
    h.endpoint = {static_cast<std::uint32_t>(n[0]),
                  static_cast<std::uint32_t>(n[1]),
                  static_cast<std::uint32_t>(n[2]),
                  static_cast<std::uint32_t>(n[3]),
                  std::string(gid.data(), 32),
                  n[4] != 0,
                  0,
                  static_cast<std::uint32_t>(n[8]),
                  n[9],
                  static_cast<std::uint32_t>(n[10])};
    h.key = {n[5], n[6], {static_cast<std::uint32_t>(n[7])}};
    return h;
}

}  // namespace mkernel::nics::testing
