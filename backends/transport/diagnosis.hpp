// The reason why a wait ended: the abort word and the one diagnostic record of a rank.
//
// Contract: the first writer wins. `claim` succeeds once per world; later failures are consequences
// of the first and are dropped. A reader sees the record complete once `code != none`.
// Plain data, no pointers: it lies in memory that several processes map.
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"
#include "backends/transport/shared_word.hpp"

namespace mkernel::transport {

enum class AbortCode : std::uint32_t {
    none = 0,
    timeout = 1,       // a wait passed its deadline
    peer_failure = 2,  // a rank died or raised
    nic_error = 3,     // the NIC reported an error completion or event
    cancelled = 4,     // the user stopped the run (Ctrl-C, finalize in mid-run)
};

// The kind of thread that waited. Mirrored by mkernel.errors.Waiter.
enum class Waiter : std::uint32_t {
    none = 0,
    comm_kernel = 1,
    compute_kernel = 2,
    proxy = 3,
    host = 4
};

struct Diagnosis {
    Waiter waiter = Waiter::none;
    std::uint32_t core = 0;    // block index of the waiting kernel
    std::uint32_t signal = 0;  // index in the signal pad
    std::uint32_t peer = 0;    // rank that should have raised it
    std::uint32_t chunk = 0;   // chunk the wait was for; UINT32_MAX: none
    std::uint32_t op = 0;      // call number of the op in its world (low 32 bits)
    std::uint64_t seen = 0;
    std::uint64_t wanted = 0;
};

struct AbortRecord {
    std::uint32_t claimed = 0;  // 0 → 1 by the first writer
    std::uint32_t code = 0;     // AbortCode, published last with release
    Diagnosis diagnosis{};
};

inline AbortCode abort_code(const AbortRecord& record) {
    return static_cast<AbortCode>(load_acquire(&record.code));
}

// Records the first failure. Any thread, any process that maps the record. Returns whether this
// call was the first.
inline bool claim_abort(AbortRecord& record, AbortCode code, const Diagnosis& diagnosis) {
    std::uint32_t expected = 0;
    if (!shared(record.claimed).compare_exchange_strong(expected, 1)) return false;
    record.diagnosis = diagnosis;
    store_release(&record.code, static_cast<std::uint32_t>(code));
    return true;
}

}  // namespace mkernel::transport
