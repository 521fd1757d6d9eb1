// The arguments of a call that every op's kernels have: the rank's number, the call's number in the world,
// and the places of its memory, its words and its peers' ones. Geometry and tensors are the op's own.
//
// All plans of a world use the same memory and the same words, in any order; calls of a world run one
// after another on each rank, and a rank may be one call ahead of another, or more where nobody waits
// for it. Everything that a rank that is ahead touches at another one therefore exists twice, for calls of
// even and of odd number (epoch):
//   inbox    written by peers, read here. A peer writes it in epoch e when this rank has released
//            e - 2: when no core of it reads its inbox, or waits for a remote word, of e - 2 or before
//            (release.hpp).
//   outbox   written here, read by the NIC. Written in epoch e when every rank of another node has
//            released e - 2: it has got, and so the NIC has read, all that was put to it then. (A NIC
//            without order may repeat a put: there the host flushes it before the next call.)
//   Remote   words that peers add to.
// Memory that only this rank touches exists once, and is free when the previous call has ended here:
//   scratch  memory of its cores.
//   Local    words that only its cores add to.
// Inbox and outbox do not overlap in any two plans, nor do remote and local words: otherwise a rank that is
// ahead could write over what this rank still reads or waits for of its own.
//
// Words are only ever added to, and a wait is for what *this* call adds: beside a word the pad keeps the
// count that it had, or will have, when all calls before this one had added everything
// (SignalPad::expected), and the word has come at that count plus the call's amount. A late addition of
// an earlier call can delay such a wait but not end it, and one of epoch e + 2 cannot come before this rank's
// release of e, which comes after its waits for remote words of e. When a call has ended, the host moves the
// counts on by what was added for it, no more and no less (host/kernels.hpp: each_amount).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/transport/channel.hpp"

namespace mkernel::ascend {

inline constexpr std::uint32_t kMaxWorld = 64;
inline constexpr std::uint32_t kSlotAlignment = 512;        // bytes
inline constexpr std::uint32_t kNoAnnotation = 0xffffffff;  // core.annotate: for no chunk

constexpr std::uint32_t divide_up(std::uint32_t a, std::uint32_t b) {
    return (a + b - 1) / b;
}

// Returns how many of `total` the part from `from` on has, when parts have at most `most`.
constexpr std::uint32_t part_of(std::uint32_t total, std::uint32_t from, std::uint32_t most) {
    const std::uint32_t left = total - from;
    return left < most ? left : most;
}

constexpr std::uint64_t slot_aligned(std::uint64_t bytes) {
    return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// Words of a plan, each kind numbered from 0.
struct Remote {
    std::uint32_t number = 0;
};
struct Local {
    std::uint32_t number = 0;
};

// The places of words in a signal pad, for all plans of all worlds alike:
//   [0, kMaxWorld)  how many calls each rank has released (release.hpp)
//   then, three in turn: remote word n in even epochs, in odd ones, local word n
constexpr std::uint32_t word_of(Remote word, std::uint64_t epoch) {
    return kMaxWorld + 3 * word.number + static_cast<std::uint32_t>(epoch & 1);
}
constexpr std::uint32_t word_of(Local word) {
    return kMaxWorld + 3 * word.number + 2;
}
// Returns the words of a pad that a plan with so many of its own needs.
constexpr std::uint64_t words_needed(std::uint32_t remote, std::uint32_t local) {
    return kMaxWorld + std::uint64_t{3} * (remote > local ? remote : local);
}

// Returns which slot of `reader`'s inbox is `source`'s: there is one for each other rank.
constexpr std::uint32_t slot_of(std::uint32_t reader, std::uint32_t source) {
    return source > reader ? source - 1 : source;
}

// A same-node rank, mapped here; both null for a rank of another node.
struct Peer {
    std::byte* pad = nullptr;
    std::byte* inbox = nullptr;
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
    std::uint64_t epoch = 1;   // number of the call in its world, from 1 on
    std::byte* pad = nullptr;  // this and the next three: the own rank's
    std::byte* inbox = nullptr;
    std::byte* outbox = nullptr;
    std::byte* scratch = nullptr;
    const Peer* peers = nullptr;           // [world]
    const std::uint32_t* order = nullptr;  // [world]: the ranks as work takes them, itself first
    transport::Channel channel;            // to ranks of other nodes
    bool compute_only = false;  // the view without communication: chunks count as present

    [[nodiscard]] constexpr std::uint32_t word(Remote word) const { return word_of(word, epoch); }
    [[nodiscard]] constexpr std::uint32_t word(Local word) const { return word_of(word); }
    [[nodiscard]] constexpr bool same_node(std::uint32_t other) const {
        return peers[other].pad != nullptr;
    }
};

}  // namespace mkernel::ascend
