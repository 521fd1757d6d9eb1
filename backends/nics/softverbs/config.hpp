// The settings of the software device, read from the environment when a device is opened. For tests and
// emulation only; everything else about it is fixed, as on a real card. A value that cannot be read fails the
// opening with EINVAL and a line on stderr.
//
// MKERNEL_SOFTVERBS_FAULTS is a list, separated by commas, of
//
//   KIND@COUNT    with the message after so many of this device (registration: the one after so many)
//   KIND@TIMEms   so long after the device was opened
//   ... +TIMEms   after either, for cut and stall: how long it lasts; without, for good
//
// of these kinds:
//
//   drop          from that message on, everything sent to its peer is lost
//   cut           nothing leaves the port or reaches it; both ends' retries run
//   stall         the device does nothing, not even run into time-outs; its peers' retries run
//   qp-error      that message's queue pair goes to ERR; RC reports it by an event
//   cq-overflow   that message's completion queue is full for good
//   registration  a registration of memory fails with ENOMEM
#pragma once

#include <cstdint>
#include <vector>

namespace mkernel::nics::softverbs {

enum class FaultKind : std::uint8_t { drop, cut, stall, qp_error, cq_overflow, registration };

struct Fault {
    FaultKind kind = FaultKind::drop;
    bool timed = false;  // `after` is nanoseconds, not a count
    std::uint64_t after = 0;
    std::uint64_t for_ns = 0;  // 0: for good
};

struct Config {
    // The link.
    std::uint64_t latency_ns = 0;  // MKERNEL_SOFTVERBS_LATENCY_NS: added to every message
    std::uint64_t jitter_ns =
        0;  // MKERNEL_SOFTVERBS_JITTER_NS: up to so much more, for each packet
    std::uint64_t bandwidth_mbps = 0;  // MKERNEL_SOFTVERBS_BANDWIDTH_MBPS: 10^6 bits a second, in
                                       // each direction of the port; 400000 is 400 Gb/s. 0: as fast
                                       // as this host copies
    std::uint64_t seed = 1;            // MKERNEL_SOFTVERBS_SEED: of all that is drawn at random
    std::vector<Fault> faults{};       // MKERNEL_SOFTVERBS_FAULTS

    // The device.
    std::uint32_t max_message = 1u << 30;  // MKERNEL_SOFTVERBS_MAX_MESSAGE: bytes
    std::uint8_t scramble = 0;  // MKERNEL_SOFTVERBS_SCRAMBLE: every payload byte is XORed with it,
                                // so that a test can see which bytes this device carried
    bool unflushed =
        false;  // MKERNEL_SOFTVERBS_UNFLUSHED=1: what it writes into device memory shows
                // when the accelerator's flush is called, and not before
    std::uint64_t late_ns =
        0;                     // MKERNEL_SOFTVERBS_LATE_NS: a broken device: what it has told of is
                               // in memory so much later; 0: an honest one
    bool by_reference = true;  // MKERNEL_SOFTVERBS_BY_REFERENCE=0: copy through the rings

    // RC.
    bool relaxed = false;  // MKERNEL_SOFTVERBS_RELAXED_ORDERING=1: writes land in any order until
                           // the next immediate, as in regions that are registered so; one in four
                           // waits for up to hold_ns

    // SRD.
    bool reorder = true;             // MKERNEL_SOFTVERBS_REORDER=0: execute in order of arrival
    std::uint64_t hold_ns = 40'000;  // MKERNEL_SOFTVERBS_HOLD_NS: a packet in four waits for up to
                                     // so long, a second placement at times for much longer
    std::uint32_t duplicates = 10;   // MKERNEL_SOFTVERBS_DUPLICATES: per cent of packets that are
                                     // placed twice
    std::uint64_t srd_timeout_ms = 500;  // MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS: until a peer that does
                                         // not answer is unreachable
    std::uint32_t srd_queue = 0;  // MKERNEL_SOFTVERBS_SRD_QUEUE: requests that a send queue holds,
                                  // fewer than it was made for; 0: as many
    bool rdma_write = true;  // MKERNEL_SOFTVERBS_RDMA_WRITE=0: an EFA device without RDMA writes
    bool rnr_retry =
        true;  // MKERNEL_SOFTVERBS_RNR_RETRY=0: one that takes no bound on such retries

    // Reads the environment. Throws std::system_error of EINVAL.
    static Config from_environment();
};

}  // namespace mkernel::nics::softverbs
