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
    std::uint64_t seed = 1;     // MKERNEL_SOFTVERBS_SEED: of what SRD reorders and duplicates
    bool reorder = true;        // MKERNEL_SOFTVERBS_REORDER=0: SRD executes in order of arrival
    std::uint32_t duplicates = 10;  // MKERNEL_SOFTVERBS_DUPLICATES: per cent of SRD packets that
                                    // are placed twice
    std::uint64_t srd_timeout_ms = 500;  // MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS: until a peer that is
                                         // gone is unreachable
    bool rdma_write = true;    // MKERNEL_SOFTVERBS_RDMA_WRITE=0: an EFA device without RDMA writes
    bool by_reference = true;  // MKERNEL_SOFTVERBS_BY_REFERENCE=0: copy through the rings

    static Config from_environment();
};

}  // namespace mkernel::nics::softverbs
