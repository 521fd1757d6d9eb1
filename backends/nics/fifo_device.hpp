// The device side of the command FIFO: how a kernel asks its host proxy thread for a put.
//
// A slot is 64 bytes and is published by its last word, a release store that carries the lap's
// parity in bit 63 (the *commit bit*); the first 56 bytes are plain stores before it. A slot of lap
// L holds a fresh command exactly when its commit bit equals parity(L) = (L + 1) & 1, so nothing
// is cleared between laps and zeroed memory is an empty ring.
// (On a GPU the last 16 bytes go out as one st.release.sys.v2.b64; the layout is made for that.)
//
// push: any number of producers, lock-free; when the ring is full it waits for the proxy
// (back-pressure, nothing is lost) until the deadline or an abort. Commands of one producer are
// executed in the order of its pushes.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "backends/runtime/signal_pad.hpp"

namespace mkernel::nics {

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

struct alignas(64) FifoSlot {
    PutCommand command;
    std::uint64_t reserved[2];
    std::uint64_t commit;  // bit 63: lap parity; the rest: the slot's ticket, for diagnosis
};
static_assert(sizeof(FifoSlot) == 64);

// Plain handle, passed to kernels by value or by address. The memory belongs to `Fifo` (fifo.hpp).
struct FifoDevice {
    FifoSlot* slots = nullptr;
    std::uint64_t* head = nullptr;  // next ticket; producers fetch_add
    std::uint64_t* tail = nullptr;  // first ticket not yet drained; the proxy stores
    std::uint32_t* bell = nullptr;  // futex word of the sleeping proxy
    std::uint32_t* sleeping = nullptr;
    std::uint64_t capacity = 0;  // slots, a power of two

    static constexpr std::uint64_t kCommitBit = std::uint64_t{1} << 63;
    static constexpr std::uint64_t commit_word(std::uint64_t ticket, std::uint64_t capacity) {
        const std::uint64_t parity = (ticket / capacity + 1) & 1;
        return (parity << 63) | (ticket & ~kCommitBit);
    }

    // Returns ok, or why the command was not queued. `pad` supplies the abort word and takes the
    // diagnosis at the deadline (monotonic_ns clock).
    runtime::WaitResult push(const PutCommand& command, const runtime::SignalPad& pad,
                             std::uint64_t deadline_ns, runtime::Diagnosis who) const;
};

}  // namespace mkernel::nics
