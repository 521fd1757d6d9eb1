// The symmetric workspace of a world as kernels see it: one allocation of the same size on each GPU, those
// of this node's ranks mapped here. Ranks of other nodes are reached through `network`. Kernels take it
// by value.
//
// Layout, the same on every rank:
//   [0, 64 KiB)        control words: the epoch, one finished and one started word a rank
//   [64 KiB, 128 KiB)  flags of brief calls
//   [128 KiB, 1 MiB)   flags: 64-bit, the plan defines what they mean
//   [1 MiB, 1.875 MiB) landed flags: what arrived in staging memory (network.cuh), by the number of its flag
//   [2 MiB, 34 MiB)    data of brief calls, of even and of odd epochs
//   [34 MiB, 66 MiB)   mail (mailbox.cuh), of even and of odd epochs
//   [66 MiB, ...)      data
//
// Brief calls are those that end without waiting for their peers (call.cuh states which may).
//
// Epochs. `CallState::epoch` is the number of the running call, 1 for the first; the call's last block moves
// it on. Every flag and word that a peer waits for is a set word that holds the epoch: transport/signal.hpp
// states why the plans that share a workspace may follow each other in any order, launched or replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/network.cuh"
#include "backends/accelerators/cuda/device/rails.cuh"
#include "backends/transport/call_state.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::cuda {

inline constexpr std::uint64_t kBriefFlagsOffset = 64u << 10;
inline constexpr std::uint64_t kFlagsOffset = 128u << 10;
inline constexpr std::uint64_t kLandedOffset = 1u << 20;
inline constexpr std::uint64_t kBriefOffset = 2u << 20;
inline constexpr std::uint64_t kBriefBytes = 16u << 20;  // of one call
inline constexpr std::uint64_t kMailOffset = kBriefOffset + 2 * kBriefBytes;
inline constexpr std::uint64_t kMailBytes = 16u << 20;  // of one call
inline constexpr std::uint64_t kDataOffset = kMailOffset + 2 * kMailBytes;

inline constexpr std::uint32_t kBriefFlags =
    (kFlagsOffset - kBriefFlagsOffset) / sizeof(transport::SetWord);
static_assert(kFlags == (kLandedOffset - kFlagsOffset) / sizeof(transport::SetWord));
static_assert(kLandedOffset + kFlags * sizeof(transport::SetWord) <= kBriefOffset);

inline constexpr int kEpochCopies = 16;

// Local to a rank, except `finished`, `started` and `landings`, whose entry [r] is written by rank r.
struct Control {
    transport::CallState state;  // its epoch is set before any peer maps the workspace, as `epochs`
    // Counters of attention's kernels (attention/core.hpp), of which two may run at a time.
    std::uint32_t counters[2][2];
    std::uint32_t pushed;  // blocks of a call's push of tokens that are done; back to 0 at its end
    std::uint32_t crossing;  // blocks of a call's crossing of keys that run; back to 0 when all do
    std::uint32_t reserved[22];
    // The epoch again, as a source from which copy engines copy into as many flags in a row.
    std::uint64_t epochs[kEpochCopies];
    std::uint64_t more_reserved[32];
    // `finished`: rank r needs nothing of this rank's of that call any more; `started`: rank r's memory may
    // be written in that call.
    transport::SetWord finished[kMaxRanks];
    transport::SetWord started[kMaxRanks];
    std::uint64_t landings[kMaxRanks];  // landing.cuh
};
static_assert(sizeof(Control) <= kBriefFlagsOffset);

struct Workspace {
    char* base[kMaxRanks];  // [rank] is this rank's own; null for ranks of other nodes
    std::int32_t rank;
    std::int32_t world;
    std::int32_t first, local;  // ranks of this node: the first one, and how many
    Network network;

    // Returns true for a rank of this node.
    __host__ __device__ bool near(int other) const { return base[other] != nullptr; }
    // The number of ranks on other nodes.
    __host__ __device__ int far() const { return world - local; }
    // Returns the `number`th of them, in the order in which they follow this node's.
    __host__ __device__ int far_rank(int number) const { return (first + local + number) % world; }
    __host__ __device__ Control& control(int of) const {
        return *reinterpret_cast<Control*>(base[of]);
    }
    __host__ __device__ Control& control() const { return control(rank); }
    __host__ __device__ transport::SetWord* flags(int of) const {
        return reinterpret_cast<transport::SetWord*>(base[of] + kFlagsOffset);
    }
    // This rank's own landed flags.
    __host__ __device__ transport::SetWord* landed() const {
        return reinterpret_cast<transport::SetWord*>(base[rank] + kLandedOffset);
    }
    __host__ __device__ transport::SetWord* brief_flags(int of) const {
        return reinterpret_cast<transport::SetWord*>(base[of] + kBriefFlagsOffset);
    }
    // The data area of a brief call.
    __host__ __device__ char* brief(int of, std::uint64_t epoch) const {
        return base[of] + kBriefOffset + epoch % 2 * kBriefBytes;
    }
    __host__ __device__ char* mail(int of, std::uint64_t epoch) const {
        return base[of] + kMailOffset + epoch % 2 * kMailBytes;
    }
    __host__ __device__ char* data(int of) const { return base[of] + kDataOffset; }
};

__host__ __device__ inline Rails rails_of(const Workspace& workspace, bool hierarchical) {
    return {workspace.rank, workspace.world / workspace.local, workspace.local, hierarchical};
}

}  // namespace mkernel::cuda
