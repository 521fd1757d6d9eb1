// What a kernel asks its host proxy thread for: plain data, without anything of a host, so that
// kernels of any device include it.
#pragma once

#include <cstdint>

namespace mkernel::transport {

// put `bytes` from (region, local_offset) here to (region, remote_offset) at `peer`, then add
// `value` to signal `signal` there. bytes == 0: only the signal. Regions are symmetric: the same
// number names the same buffer on every rank.
struct PutCommand {
    std::uint64_t local_offset = 0;
    std::uint64_t remote_offset = 0;
    std::uint64_t bytes = 0;
    std::uint32_t peer = 0;    // rank
    std::uint32_t region = 0;  // symmetric region number
    std::uint32_t signal = kNoSignal;
    std::uint32_t value = 0;

    static constexpr std::uint32_t kNoSignal = 0xffffffff;
};

}  // namespace mkernel::transport
