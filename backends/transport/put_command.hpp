// The command by which a kernel requests a put from its host proxy thread: plain data, without anything of a
// host, so that kernels of any device include it.
#pragma once

#include <cstdint>

namespace mkernel::transport {

// A put of `bytes` from (region, local_offset) here to (region, remote_offset) at `peer`, followed by an
// addition of `value` to signal `signal` there. bytes == 0: only the signal. Regions are symmetric: the same
// number names the same buffer on every rank.
//
// A *completion* is a command to kSelf without bytes: `value` is added to the own rank's `signal` once
// all commands before it in its ring, whatever their peers, are complete locally. Their sources may then
// be written again, also on a NIC that keeps no order and may place a put twice. It does not imply that peers
// have seen anything.
struct PutCommand {
    std::uint64_t local_offset = 0;
    std::uint64_t remote_offset = 0;
    std::uint64_t bytes = 0;
    std::uint32_t peer = 0;    // rank
    std::uint32_t region = 0;  // symmetric region number
    std::uint32_t signal = kNoSignal;
    std::uint32_t value = 0;

    static constexpr std::uint32_t kNoSignal = 0xffffffff;
    static constexpr std::uint32_t kSelf = 0xffffffff;  // as peer
};

}  // namespace mkernel::transport
