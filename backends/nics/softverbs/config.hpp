// What can be set on the software device, read from the environment when a device is opened. For
// tests and emulation only; everything else about it is fixed, as on a real card.
#pragma once

#include <cstdint>

namespace mkernel::nics::softverbs {

struct Config {
    std::uint64_t latency_ns = 0;  // MKERNEL_SOFTVERBS_LATENCY_NS: added to every message
    std::uint64_t drop_after = 0;  // MKERNEL_SOFTVERBS_DROP_AFTER: a QP's link dies after so many
                                   // messages; 0: never
    std::uint32_t max_message = 1u << 30;  // MKERNEL_SOFTVERBS_MAX_MESSAGE: bytes
    std::uint8_t scramble = 0;  // MKERNEL_SOFTVERBS_SCRAMBLE: every payload byte is XORed with it,
                                // so that a test can see which bytes this device carried
    bool by_reference = true;   // MKERNEL_SOFTVERBS_BY_REFERENCE=0: copy through the rings

    static Config from_environment();
};

}  // namespace mkernel::nics::softverbs
