// AllGather+GEMM: the arguments of both kernels, and the geometry that they must agree on.
//
// Rows of A are cut into tiles of tile_m x tile_k, numbered row group by row group, K fastest; a
// chunk is `tiles_per_chunk` consecutive tiles, the last one shorter. A rank's packed form of its
// rows (the *staging slot*) holds its tiles one after another, each dense in its valid size: slot
// bytes are exactly m_local * k elements and a chunk is one contiguous range.
//
// Memory of a rank (call.hpp):
//   inbox   a slot for each other rank, which receives its rows
//   outbox  a slot in which chunks are packed for NIC puts
//
// Words:
//   arrived(s, c)  remote: +1 by rank s when chunk c is in place here
//   finished       local: +1 by each compute block (release.hpp)
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::ag_gemm {

struct Geometry {
    std::uint32_t world = 1;
    std::uint32_t m_local = 0, n = 0, k = 0;
    std::uint32_t tile_m = 0, tile_n = 0, tile_k = 0, step_k = 0, tiles_per_chunk = 1;
    isa::DType dtype = isa::DType::float16;

    [[nodiscard]] constexpr Tiling tiling() const { return {tile_m, tile_n, tile_k, step_k}; }
    [[nodiscard]] constexpr std::uint32_t row_groups() const { return divide_up(m_local, tile_m); }
    [[nodiscard]] constexpr std::uint32_t k_tiles() const { return divide_up(k, tile_k); }
    [[nodiscard]] constexpr std::uint32_t n_tiles() const { return divide_up(n, tile_n); }
    [[nodiscard]] constexpr std::uint32_t tiles() const { return row_groups() * k_tiles(); }
    [[nodiscard]] constexpr std::uint32_t chunks() const {
        return divide_up(tiles(), tiles_per_chunk);
    }
    [[nodiscard]] constexpr std::uint32_t chunk_of(std::uint32_t tile) const {
        return tile / tiles_per_chunk;
    }
    [[nodiscard]] constexpr std::uint32_t chunk_end(std::uint32_t chunk) const {
        const std::uint32_t end = (chunk + 1) * tiles_per_chunk;
        return end < tiles() ? end : tiles();
    }
    [[nodiscard]] constexpr std::uint32_t rows_of(std::uint32_t row_group) const {
        return part_of(m_local, row_group * tile_m, tile_m);
    }
    [[nodiscard]] constexpr std::uint32_t depth_of(std::uint32_t k_tile) const {
        return part_of(k, k_tile * tile_k, tile_k);
    }

    // Returns the bytes from the start of a slot to tile (row_group, k_tile).
    [[nodiscard]] constexpr std::uint64_t tile_offset(std::uint32_t row_group,
                                                      std::uint32_t k_tile) const {
        const std::uint64_t elements = std::uint64_t{row_group} * tile_m * k +
                                       std::uint64_t{rows_of(row_group)} * k_tile * tile_k;
        return elements * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr Range chunk_range(std::uint32_t chunk) const {
        const auto start_of = [this](std::uint32_t tile) {
            return tile == tiles() ? std::uint64_t{m_local} * k * isa::bytes_of(dtype)
                                   : tile_offset(tile / k_tiles(), tile % k_tiles());
        };
        const std::uint64_t begin = start_of(chunk * tiles_per_chunk);
        return {begin, start_of(chunk_end(chunk)) - begin};
    }
    [[nodiscard]] constexpr std::uint64_t slot_bytes() const {
        return slot_aligned(std::uint64_t{m_local} * k * isa::bytes_of(dtype));
    }
    // Returns the bytes from the start of `reader`'s inbox to the slot of `source`.
    [[nodiscard]] constexpr std::uint64_t slot_offset(std::uint32_t reader,
                                                      std::uint32_t source) const {
        return slot_of(reader, source) * slot_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t inbox_bytes() const { return (world - 1) * slot_bytes(); }
    [[nodiscard]] constexpr std::uint64_t outbox_bytes() const {
        return world == 1 ? 0 : slot_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t scratch_bytes() const { return 0; }

    [[nodiscard]] constexpr Remote arrived(std::uint32_t source, std::uint32_t chunk) const {
        return {source * chunks() + chunk};
    }
    [[nodiscard]] constexpr Local finished() const { return {0}; }
    [[nodiscard]] constexpr std::uint64_t words() const {
        return words_needed(arrived(world, 0).number, 1);
    }
};

struct Args : CallArgs {
    Geometry geometry;
    isa::GlobalView a;                          // [m_local, k], rows contiguous
    isa::GlobalView b;                          // [k, n], rows or columns contiguous
    isa::GlobalView out;                        // [world * m_local, n], rows contiguous
    const std::uint32_t* send_order = nullptr;  // [chunks]: the order in which chunks leave

    // Returns tile (row_group, k_tile) of a rank's rows in a slot.
    [[nodiscard]] constexpr isa::GlobalView staged(std::byte* slot, std::uint32_t row_group,
                                                   std::uint32_t k_tile) const {
        const Geometry& g = geometry;
        return {slot + g.tile_offset(row_group, k_tile),
                g.dtype,
                g.rows_of(row_group),
                g.depth_of(k_tile),
                g.depth_of(k_tile),
                1};
    }
    [[nodiscard]] constexpr isa::GlobalView own_tile(std::uint32_t row_group,
                                                     std::uint32_t k_tile) const {
        const Geometry& g = geometry;
        return a.sub(std::int64_t{row_group} * g.tile_m, std::int64_t{k_tile} * g.tile_k,
                     g.rows_of(row_group), g.depth_of(k_tile));
    }
};

}  // namespace mkernel::ascend::ag_gemm
