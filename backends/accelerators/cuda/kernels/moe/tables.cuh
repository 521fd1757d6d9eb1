// The tables that a dispatch leaves of its routing: 32-bit words on the device, which later calls read. What
// this file computes is plain arithmetic, for host and device.
//
// A *place* is (source rank, token, slot of top-k), counted in that order; a rank's *rows* are the places
// whose expert it has, by expert, then place. Words, of P places and E experts of this rank:
//   [0, P)       the expert of each place, of all ranks; -1: none
//   [P, 2P)      the row of each place; -1: it has none here
//   [2P, 3P)     the place of each row
//   then         tiles, 4 words each (Tile); after the last one comes one of expert -1
//   then         of each tile, 2 words, how many groups of kGroupRows of its rows were permuted
//   at the end   how many groups were claimed by who permutes them, rows (0 where refused), refused, and
//                how many rows the outputs have: their capacity, where they have one
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::cuda::moe {

inline constexpr int kTileRows = 256;  // of a cluster
inline constexpr int kGroupRows = 4;   // that a warp permutes at a time
inline constexpr int kTileGroups = kTileRows / kGroupRows;

// Rows of one expert, [first, first + rows), at most kTileRows.
struct Tile {
    std::int32_t expert, first, rows, reserved;
};

struct Tables {
    std::int32_t* words;
    std::int32_t world, tokens, top_k, experts;  // experts: of one rank

    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t places() const {
        return std::int64_t{world} * tokens * top_k;
    }
    // Own rows that come first make two more pieces of an expert's rows, each of which has a rest.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t most_tiles() const {
        return places() / kTileRows + 3 * std::int64_t{experts} + 1;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t first_tile() const {
        return (3 * places() + 3) / 4 * 4;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int64_t count() const {
        return first_tile() + 6 * most_tiles() + 4;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* ids() const { return words; }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* place_row() const { return words + places(); }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t* row_place() const {
        return words + 2 * places();
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE Tile* tiles() const {
        return reinterpret_cast<Tile*>(words + first_tile());
    }
    // The number of a tile's groups of rows that are there; it starts from 0 in each call, set so by the
    // call's routing.
    [[nodiscard]] MKERNEL_HOST_DEVICE transport::AddedWord* permuted() const {
        return reinterpret_cast<transport::AddedWord*>(words + first_tile() + 4 * most_tiles());
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t& claimed() const { return words[count() - 4]; }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t& rows() const { return words[count() - 3]; }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t& refused() const { return words[count() - 2]; }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t& height() const { return words[count() - 1]; }
};

// A dispatch's report to the host, in pinned memory.
struct Report {
    std::uint32_t call;     // whose `rows` these are; written last
    std::int32_t rows;      // of this rank
    std::uint32_t refused;  // 1: a rank had more rows than its capacity, since the host last looked
    std::int32_t rank, most, capacity;  // which one, how many, and the capacity
};

}  // namespace mkernel::cuda::moe
