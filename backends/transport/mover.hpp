// The functions that an accelerator supplies so that others reach its memory: a *mover*, by which an emulated
// NIC copies it, and a *flush*, after which its kernels see what a NIC wrote. They are plain functions, so
// that neither side links the other. Each returns 0 or a negative errno, throws nothing, and may be called by
// any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace mkernel::transport {

// Makes bytes that NICs have written so far visible to kernels that run. It lives as long as any session that
// was given it.
struct DeviceFlush {
    int (*flush)(void* self);
    void* self;
};

// The facts that a process must know, beside a descriptor, to map memory of another process.
struct ExportedMemory {
    std::uint64_t bytes = 0;   // of the whole allocation
    std::uint64_t offset = 0;  // of the exported range in it
    char device[32] = {};      // the mover's own word for the device
};

// Copies are queued, submitted in batches, and end later. One batch may have copies of several callers.
struct Mover {
    static constexpr std::uint32_t kVersion = 1;

    std::uint32_t version = kVersion;
    void* self = nullptr;

    // Returns 1 where all of the range is in one allocation of this process that it moves; else 0.
    int (*owns)(void* self, std::uint64_t address, std::uint64_t bytes) = nullptr;
    // Makes a new descriptor, the caller's to close, by which other processes attach the range.
    int (*export_memory)(void* self, std::uint64_t address, std::uint64_t bytes,
                         ExportedMemory* exported, int* fd) = nullptr;
    // Maps memory that a peer exported, and returns where its range begins here, an address for copies alone.
    // `fd` stays the caller's. May be called while kernels run. detach(): no copy uses it any more.
    int (*attach)(void* self, const ExportedMemory* exported, int fd,
                  std::uint64_t* address) = nullptr;
    void (*detach)(void* self, std::uint64_t address) = nullptr;

    // Adds a copy to the batch that is being filled. Each end is an address that it owns or attached,
    // or one of the host, but not both. A host source has been read when this returns. Where two
    // copies overlap in what they write, the later one lasts. -EAGAIN: no room until an earlier batch is
    // done.
    int (*copy)(void* self, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) = nullptr;
    // Submits the batch; returns its ticket.
    int (*submit)(void* self, std::uint64_t* ticket) = nullptr;
    // Returns 1 when that batch and all earlier ones are done, 0 before. Host memory that they write is there
    // then, and kernels see device memory that they wrote.
    int (*done)(void* self, std::uint64_t ticket) = nullptr;

    // Set by an emulated NIC that holds back its writes until a flush: the accelerator's DeviceFlush calls
    // it.
    std::atomic<void (*)()> flushed{nullptr};
};

}  // namespace mkernel::transport
