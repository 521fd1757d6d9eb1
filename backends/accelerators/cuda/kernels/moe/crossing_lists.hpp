// The tokens that cross between nodes, as each rank derives them from ids alone: to every rank of another node, or
// hierarchically to every other node, a list of those tokens that it wants. What this file computes is plain
// arithmetic, for host and device.
//
// A list is ordered by the first expert that wants a token there, in `kGroups` groups of a rank's experts (the
// ranks of a node multiply their first experts at the same time), then by token. It is cut into `pieces` of equally
// many rows, the last of which may be empty. So experts get their rows in the order in which they are multiplied:
// those of expert e are there when all pieces up to the end of its group are.
//
// Words, in the data area:
//   [0, W T)     of each rank of another node, the place of each token in its list for here; -1: it has none
//   [W T, 2W T)  of each of these ranks, the token at each place
//   [.., 3W T)   the tokens of the own lists, by the rank that they are put to
//   then         of each rank, where each group of its list for here ends [W, kGroups]; then those of the own lists
//   then         how many blocks have written, or landed, each piece for or of each rank [pieces, W]; and how many have
//                made lists; 0 before the call's first put, and when all have
//
// Flags: those of ids and of near tokens are host/moe/ops.hpp's. `flag(s, p)`: piece p of rank s is there, and so
// are all pieces before it. `listed_flag`: the lists are there.
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"

namespace mkernel::cuda::moe {

inline constexpr int kGroups = 32;
inline constexpr int kMostPieces = 16;

// Where the lists of a call are, and how many pieces one has. 0: the call exchanges nothing between nodes.
struct Crossing {
    std::uint64_t offset;  // of the words, in the data area
    std::int32_t pieces;
};

struct CrossingLists {
    std::int32_t* words;
    std::int32_t world, tokens, pieces;

    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t all() const {
        return std::int64_t{world} * tokens;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t count() const {
        return 3 * all() + 2 * world * kGroups + world * pieces + 1;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* places(int source) const {
        return words + std::int64_t{source} * tokens;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* arriving(int source) const {
        return words + all() + std::int64_t{source} * tokens;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* leaving(int peer) const {
        return words + 2 * all() + std::int64_t{peer} * tokens;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* ends(int source) const {
        return words + 3 * all() + source * kGroups;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* leaving_ends(int peer) const {
        return ends(world + peer);
    }

    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t* done(int rank, int piece) const {
        return reinterpret_cast<std::uint32_t*>(leaving_ends(world)) + piece * world + rank;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t* listed() const { return done(0, pieces); }

    [[nodiscard]] MKERNEL_HOST_DEVICE int piece_rows() const {
        return (tokens + pieces - 1) / pieces;
    }
    // Returns the last piece that a rank's rows of an expert, of `experts`, are in. The arithmetic stays within the
    // pieces also where a call was given up before its lists were made.
    [[nodiscard]] MKERNEL_HOST_DEVICE int last_piece(int source, int expert, int experts) const {
        const int end = ends(source)[group_of(expert, experts)];
        return (end <= 0 ? 0 : end > tokens ? tokens - 1 : end - 1) / piece_rows();
    }
    // Returns the place of a token in its rank's list, in the same way.
    [[nodiscard]] MKERNEL_HOST_DEVICE int place(int source, int token) const {
        const int found = places(source)[token];
        return found < 0 || found >= tokens ? 0 : found;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE static int group_of(int expert, int experts) {
        return static_cast<int>(std::int64_t{expert} * kGroups / experts);
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t flag(int source, int piece) const {
        return static_cast<std::uint32_t>(2 * world + source * pieces + piece);
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t listed_flag() const { return flag(world, 0); }
};

}  // namespace mkernel::cuda::moe
