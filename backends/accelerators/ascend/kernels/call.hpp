// What every op's kernels know of a call: who this rank is, which epoch, and where its memory and
// its peers' lies. Geometry and tensors are the op's own.
//
// Signals only grow. Those that a peer may raise for epoch e+1 before this rank has consumed epoch
// e come in two sets, by the epoch's parity: on a NIC without order a flag of e+1 must not be taken
// for one of e. Such a flag is complete at `uses` times what one call adds to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/accelerators/ascend/isa/tile.hpp"

namespace mkernel::ascend {

inline constexpr std::uint32_t kMaxWorld = 64;
inline constexpr std::uint32_t kSlotAlignment = 512;        // bytes
inline constexpr std::uint32_t kNoAnnotation = 0xffffffff;  // core.annotate: for no chunk

constexpr std::uint32_t divide_up(std::uint32_t a, std::uint32_t b) {
    return (a + b - 1) / b;
}

// How many of `total` the part from `from` on has, of parts of `most`.
constexpr std::uint32_t part_of(std::uint32_t total, std::uint32_t from, std::uint32_t most) {
    const std::uint32_t left = total - from;
    return left < most ? left : most;
}

constexpr std::uint64_t slot_aligned(std::uint64_t bytes) {
    return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// A same-node rank, mapped here; both null for a rank of another node.
struct Peer {
    std::byte* pad = nullptr;
    std::byte* workspace = nullptr;
};

struct Range {
    std::uint64_t offset = 0, bytes = 0;
};

// Sizes of a product's tiles: A tile_m x tile_k, B tile_k x tile_n, one matrix step step_k deep.
struct Tiling {
    std::uint32_t tile_m = 0, tile_n = 0, tile_k = 0, step_k = 0;
};

struct CallArgs {
    std::uint32_t rank = 0;
    std::uint64_t epoch = 1;
    std::byte* pad = nullptr;              // the own rank's
    std::byte* workspace = nullptr;        // the own rank's
    const Peer* peers = nullptr;           // [world]
    const std::uint32_t* order = nullptr;  // [world]: the ranks as work takes them, itself first
    std::uint32_t signal_base = 0;         // the plan's first signal
    std::uint32_t region = 0;              // of the workspace, for NIC puts
    bool compute_only = false;  // the view without communication: chunks count as present

    [[nodiscard]] constexpr std::uint32_t parity() const {
        return static_cast<std::uint32_t>(epoch & 1);
    }
    // How many calls up to this one had its parity.
    [[nodiscard]] constexpr std::uint64_t uses() const { return (epoch + 1) / 2; }
    [[nodiscard]] constexpr bool same_node(std::uint32_t other) const {
        return peers[other].pad != nullptr;
    }
};

}  // namespace mkernel::ascend
