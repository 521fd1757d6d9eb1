// The conventions of both ends of the command FIFO, for any producer: the slot, how it is published, and
// where a ring lies. Host code and CUDA.
//
// A slot is 64 bytes and is published by its last word, a release store that carries the lap's parity in
// bit 63 (the *commit bit*); the bytes before it are plain stores. A slot of lap L holds a fresh command
// exactly when its commit bit equals parity(L) = (L + 1) & 1, so nothing is cleared between laps and
// zeroed memory is an empty ring. A producer takes a ticket only when its slot is free, and then always
// publishes, so the drainer never waits for a hole.
//
// The following holds in every interleaving, and is tried in them (tests/native/model/test_fifo_model.cpp):
// the drainer gets every published command once, whole, and in its producer's order; no slot is written that
// the drainer may still read; no thread sleeps for ever; a producer that gives up leaves no ticket.
//
// The tickets of a ring are counted where its producers run, so a FIFO has two rings: fifo_host.hpp pushes
// from threads of the host, fifo_device.hpp from a grid.
#pragma once

#include <cstdint>

#include "backends/transport/atomics.hpp"
#include "backends/transport/put_command.hpp"

namespace mkernel::transport {

struct alignas(64) FifoSlot {
    PutCommand command;
    std::uint64_t reserved[2];
    std::uint64_t commit;  // bit 63: lap parity; the rest: the slot's ticket, for diagnosis

    static constexpr std::uint64_t kCommitBit = std::uint64_t{1} << 63;

    // `capacity` is a power of two.
    [[nodiscard]] MKERNEL_HOST_DEVICE static constexpr std::uint64_t commit_word(
        std::uint64_t ticket, std::uint64_t capacity) {
        return (ticket & capacity) == 0 ? ticket | kCommitBit : ticket & ~kCommitBit;
    }

    // Writes the slot, on a device by 16-byte stores, each of which becomes one PCIe write. It is to be
    // published by a release store to `commit`.
    MKERNEL_HOST_DEVICE void write(const PutCommand& what) {
#ifdef __CUDA_ARCH__
        const auto pair = [](std::uint32_t low, std::uint32_t high) {
            return std::uint64_t{low} | std::uint64_t{high} << 32;
        };
        const auto store = [this](int offset, std::uint64_t first, std::uint64_t second) {
            asm volatile(
                "st.global.v2.u64 [%0], {%1, %2};" ::"l"(reinterpret_cast<char*>(this) + offset),
                "l"(first), "l"(second)
                : "memory");
        };
        store(0, what.local_offset, what.remote_offset);
        store(16, what.bytes, pair(what.peer, what.region));
        store(32, pair(what.signal, what.value), 0);
#else
        command = what;
#endif
    }
};
static_assert(sizeof(FifoSlot) == 64);

// A ring in host pages that hold nothing else, so that an accelerator may register them with its device. The
// tail and the slots lie in these pages.
struct FifoRingMemory {
    void* pages = nullptr;
    std::uint64_t bytes = 0;  // whole pages
    FifoSlot* slots = nullptr;
    std::uint64_t* tail = nullptr;  // first ticket not yet drained; the proxy stores
    std::uint64_t capacity = 0;     // slots, a power of two

    // Returns the ticket of the next command, while nobody produces.
    [[nodiscard]] std::uint64_t head() const {
        const std::uint64_t drained = load_acquire(tail);
        std::uint64_t ticket = drained;
        while (ticket - drained < capacity &&
               load_acquire(&slots[ticket & (capacity - 1)].commit) ==
                   FifoSlot::commit_word(ticket, capacity)) {
            ++ticket;
        }
        return ticket;
    }
};

}  // namespace mkernel::transport
