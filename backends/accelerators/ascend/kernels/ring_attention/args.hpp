// Ring attention: the arguments of its kernels, and the geometry that they must agree on.
//
// Data flow of a rank:
//   own k, v → vector cores → every rank that needs them, chunk by chunk (TPUT, or packed and NIC)
//   cube cores, one tile of queries after another, blocks of keys in a fixed order (steps.hpp):
//     q · kᵀ → scores, float32, in the ring of the cube core, in memory
//     vector cores: scale, mask, running maximum → weights e^(s - max), in the input's dtype → ring
//     weights · v → part, float32 → ring
//     vector cores: result · e^(old max - new max) + part; after the last block divided by the sum
//     of weights, rounded once → out, and max + log sum → lse
// Cube part and vector part work on different tiles at a time: a cube core is kAhead tiles of scores
// ahead of the parts it makes, and two vector cores share the rows of each of its tiles.
//
// Causal: positions are cut in 2 * world pieces; rank r holds pieces r and 2 * world - 1 - r, so
// that all ranks have the same work. Positions that no query of a rank can see are not sent there.
//
// A chunk is `rows_per_chunk` positions of a piece, the last one shorter. Memory of a rank
// (call.hpp):
//   inbox    a slot for each other rank: its positions one after another, of each the keys of all
//            heads, then their values. So a chunk is one contiguous range, and tiles of keys may have
//            any number of chunks.
//   outbox   a slot in which chunks are packed for NIC puts
//   scratch  the ring of each cube core; of each query what the own keys have given: its result, in
//            float32, the running maximum and the running sum
//
// Words:
//   arrived(s, c)  remote: +1 by rank s when chunk c is in place here
//   finished       local: +1 by each cube core (release.hpp)
//   scored(b)      local: +1 a step by cube core b: the step's scores and part are in its ring
//   weighed(v)     local: +1 a tile by vector core v: its rows' weights are there, and the part before
//                  them is taken
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::ring_attention {

inline constexpr std::uint32_t kVectorsPerCube = 2;
// A step of a cube core makes the scores of one tile and the part of the tile kAhead before it.
inline constexpr std::uint32_t kAhead = 2;
inline constexpr std::uint32_t kRing = kAhead + 1;
inline constexpr std::uint32_t kMaxKeys = 1024;     // of a tile
inline constexpr std::uint32_t kOrderedKeys = 128;  // of a tile of invariant results
// Row blocks of a tile of queries, which share the loads of keys and values.
inline constexpr std::uint32_t kBlocks = 2;
inline constexpr std::uint32_t kBlockQueries = 128;
inline constexpr std::uint32_t kMaxQueries = kBlocks * kBlockQueries;  // of a tile
inline constexpr std::uint32_t kBlockResults = 128 * 128;  // float32 elements of a block's results
inline constexpr std::uint32_t kMaxHeadDim = kBlockResults / 16;

struct Geometry {
    std::uint32_t world = 1;
    std::uint32_t batch = 1, heads = 1, kv_heads = 1;
    std::uint32_t rows = 0;  // positions of a rank
    std::uint32_t head_dim = 0;
    bool causal = false;
    bool ordered =
        false;  // invariant results: blocks of kOrderedKeys keys in the order of positions
    std::uint32_t rows_per_chunk = 1;
    std::uint32_t cubes = 1;  // cube cores
    isa::DType dtype = isa::DType::float16;

    [[nodiscard]] constexpr Tiling tiling() const {
        const std::uint32_t size = isa::bytes_of(dtype);
        return {kBlockQueries, 128, 256 / size, 256 / size};
    }

    // Positions.
    [[nodiscard]] constexpr std::uint32_t pieces() const { return causal ? 2 : 1; }
    [[nodiscard]] constexpr std::uint32_t piece_rows() const { return rows / pieces(); }
    // Returns which piece of the sequence the `which`th of a rank is.
    [[nodiscard]] constexpr std::uint32_t piece(std::uint32_t rank, std::uint32_t which) const {
        return which == 0 ? rank : 2 * world - 1 - rank;
    }
    // Returns the rank that has a piece of the sequence.
    [[nodiscard]] constexpr std::uint32_t owner(std::uint32_t of_sequence) const {
        return of_sequence < world ? of_sequence : 2 * world - 1 - of_sequence;
    }

    // The chunks of a rank, numbered through its pieces.
    [[nodiscard]] constexpr std::uint32_t chunks_per_piece() const {
        return divide_up(piece_rows(), rows_per_chunk);
    }
    [[nodiscard]] constexpr std::uint32_t chunks() const { return pieces() * chunks_per_piece(); }
    [[nodiscard]] constexpr std::uint32_t piece_of(std::uint32_t chunk) const {
        return chunk / chunks_per_piece();
    }
    [[nodiscard]] constexpr std::uint32_t chunk_at(std::uint32_t which, std::uint32_t row) const {
        return which * chunks_per_piece() + row / rows_per_chunk;
    }
    // Returns a chunk's first position in its piece.
    [[nodiscard]] constexpr std::uint32_t chunk_start(std::uint32_t chunk) const {
        return chunk % chunks_per_piece() * rows_per_chunk;
    }
    [[nodiscard]] constexpr std::uint32_t chunk_rows(std::uint32_t chunk) const {
        return part_of(piece_rows(), chunk_start(chunk), rows_per_chunk);
    }
    // Returns true where any query of `reader` sees a key of `source`'s chunk.
    [[nodiscard]] constexpr bool needs(std::uint32_t reader, std::uint32_t source,
                                       std::uint32_t chunk) const {
        return !causal || piece(source, piece_of(chunk)) <= piece(reader, 1);
    }

    // Short pieces have smaller tiles: the first keys of other ranks come early, and there is a tile of
    // queries for each core.
    [[nodiscard]] constexpr bool long_pieces() const { return piece_rows() >= kMaxKeys; }
    // The tiles of keys of a rank, numbered through its pieces.
    [[nodiscard]] constexpr std::uint32_t tile_keys() const {
        if (ordered) return kOrderedKeys;
        const std::uint32_t all = divide_up(piece_rows(), 32) * 32;
        const std::uint32_t most = long_pieces() ? kMaxKeys : kMaxKeys / 2;
        return all < most ? all : most;
    }
    [[nodiscard]] constexpr std::uint32_t key_tiles_per_piece() const {
        return divide_up(piece_rows(), tile_keys());
    }
    // The tiles of queries, which are items of work.
    [[nodiscard]] constexpr std::uint32_t tile_queries() const {
        const std::uint32_t blocks = long_pieces() ? kBlocks : 1;
        const std::uint32_t most = kBlockResults / head_dim / 16 * 16;
        return blocks * (most < kBlockQueries ? most : kBlockQueries);
    }
    [[nodiscard]] constexpr std::uint32_t tiles_per_piece() const {
        return divide_up(piece_rows(), tile_queries());
    }
    [[nodiscard]] constexpr std::uint32_t items() const {
        return batch * heads * pieces() * tiles_per_piece();
    }

    // The heads of keys, of all sequences of the batch.
    [[nodiscard]] constexpr std::uint32_t planes() const { return batch * kv_heads; }

    // The bytes of a slot: keys and values of all positions.
    [[nodiscard]] constexpr std::uint64_t row_bytes() const {
        return std::uint64_t{head_dim} * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr std::uint64_t position_bytes() const {
        return 2 * std::uint64_t{planes()} * row_bytes();
    }
    [[nodiscard]] constexpr Range chunk_range(std::uint32_t chunk) const {
        const std::uint64_t before =
            std::uint64_t{piece_of(chunk)} * piece_rows() + chunk_start(chunk);
        return {before * position_bytes(), chunk_rows(chunk) * position_bytes()};
    }
    [[nodiscard]] constexpr std::uint64_t slot_bytes() const {
        return slot_aligned(rows * position_bytes());
    }
    // Returns the bytes from the start of `reader`'s inbox to the slot of `source`.
    [[nodiscard]] constexpr std::uint64_t slot_offset(std::uint32_t reader,
                                                      std::uint32_t source) const {
        return slot_of(reader, source) * slot_bytes();
    }

    // The ring of a cube core: kRing tiles of scores, of weights and of parts.
    [[nodiscard]] constexpr std::uint64_t scores_bytes() const {
        return std::uint64_t{tile_queries()} * tile_keys() * sizeof(float);
    }
    [[nodiscard]] constexpr std::uint64_t weights_bytes() const {
        return std::uint64_t{tile_queries()} * tile_keys() * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr std::uint64_t part_bytes() const {
        return std::uint64_t{tile_queries()} * head_dim * sizeof(float);
    }
    [[nodiscard]] constexpr std::uint64_t ring_offset(std::uint32_t cube) const {
        const std::uint64_t bytes =
            slot_aligned(kRing * (scores_bytes() + weights_bytes() + part_bytes()));
        return cube * bytes;
    }
    [[nodiscard]] constexpr std::uint64_t inbox_bytes() const { return (world - 1) * slot_bytes(); }
    [[nodiscard]] constexpr std::uint64_t outbox_bytes() const {
        return world == 1 ? 0 : slot_bytes();
    }
    // Returns the number of queries of all heads.
    [[nodiscard]] constexpr std::uint64_t all_rows() const {
        return std::uint64_t{batch} * heads * rows;
    }
    // Return the bytes from the start of the scratch memory to a query's result, and to its `which`th column.
    [[nodiscard]] constexpr std::uint64_t result_offset(std::uint64_t row) const {
        return ring_offset(cubes) + row * head_dim * sizeof(float);
    }
    [[nodiscard]] constexpr std::uint64_t column_offset(std::uint32_t which,
                                                        std::uint64_t row) const {
        return result_offset(all_rows()) + (which * all_rows() + row) * sizeof(float);
    }
    [[nodiscard]] constexpr std::uint64_t scratch_bytes() const {
        return world == 1 ? ring_offset(cubes) : column_offset(2, 0);
    }

    [[nodiscard]] constexpr Remote arrived(std::uint32_t source, std::uint32_t chunk) const {
        return {source * chunks() + chunk};
    }
    [[nodiscard]] constexpr Local finished() const { return {0}; }
    [[nodiscard]] constexpr Local scored(std::uint32_t cube) const { return {1 + cube}; }
    [[nodiscard]] constexpr Local weighed(std::uint32_t vector) const {
        return {scored(cubes).number + vector};
    }
    [[nodiscard]] constexpr std::uint64_t words() const {
        return words_needed(arrived(world, 0).number, weighed(cubes * kVectorsPerCube).number);
    }
};

struct Args : CallArgs {
    Geometry geometry;
    // Rows contiguous; a row is one position of one head, positions fastest.
    isa::GlobalView q, out;  // [batch * heads * rows, head_dim]
    isa::GlobalView k, v;    // [batch * kv_heads * rows, head_dim]
    isa::GlobalView lse;     // [batch * heads * rows, 1] float32
    float scale = 1;

    // Returns keys, or values, of head `plane` (batch * kv_heads + head): `count` of a rank's from the `at`th
    // position of its `piece`th piece on. Those of other ranks are laid out as in a slot.
    [[nodiscard]] constexpr isa::GlobalView keys(std::byte* slot, std::uint32_t piece, bool values,
                                                 std::uint32_t plane, std::uint32_t at,
                                                 std::uint32_t count) const {
        const Geometry& g = geometry;
        const std::uint64_t row = std::uint64_t{piece} * g.piece_rows() + at;
        const std::uint64_t head = (values ? g.planes() : 0) + plane;
        return {slot + row * g.position_bytes() + head * g.row_bytes(),
                g.dtype,
                count,
                g.head_dim,
                std::int64_t{2} * g.planes() * g.head_dim,
                1};
    }
    [[nodiscard]] constexpr isa::GlobalView own_keys(std::uint32_t piece, bool values,
                                                     std::uint32_t plane, std::uint32_t at,
                                                     std::uint32_t count) const {
        const Geometry& g = geometry;
        const std::int64_t row = std::int64_t{plane} * g.rows + piece * g.piece_rows() + at;
        return (values ? v : k).sub(row, 0, count, g.head_dim);
    }

    // Return what the own keys have contributed to `count` queries from a row on: results, and the running
    // maximum (0) or sum (1).
    [[nodiscard]] constexpr isa::GlobalView paused(std::uint64_t row, std::uint32_t count) const {
        const Geometry& g = geometry;
        return {
            scratch + g.result_offset(row), isa::DType::float32, count, g.head_dim, g.head_dim, 1};
    }
    [[nodiscard]] constexpr isa::GlobalView paused_column(std::uint32_t which, std::uint64_t row,
                                                          std::uint32_t count) const {
        return {scratch + geometry.column_offset(which, row), isa::DType::float32, count, 1, 1, 1};
    }

    // Returns the `step`th tile in the ring of a cube core, with all its rows.
    [[nodiscard]] constexpr isa::GlobalView scores(std::uint32_t cube, std::uint32_t step,
                                                   std::uint32_t queries,
                                                   std::uint32_t count) const {
        const Geometry& g = geometry;
        return {scratch + g.ring_offset(cube) + step % kRing * g.scores_bytes(),
                isa::DType::float32,
                queries,
                count,
                g.tile_keys(),
                1};
    }
    [[nodiscard]] constexpr isa::GlobalView weights(std::uint32_t cube, std::uint32_t step,
                                                    std::uint32_t queries,
                                                    std::uint32_t count) const {
        const Geometry& g = geometry;
        return {scratch + g.ring_offset(cube) + kRing * g.scores_bytes() +
                    step % kRing * g.weights_bytes(),
                g.dtype,
                queries,
                count,
                g.tile_keys(),
                1};
    }
    [[nodiscard]] constexpr isa::GlobalView part(std::uint32_t cube, std::uint32_t step,
                                                 std::uint32_t queries) const {
        const Geometry& g = geometry;
        return {scratch + g.ring_offset(cube) + kRing * (g.scores_bytes() + g.weights_bytes()) +
                    step % kRing * g.part_bytes(),
                isa::DType::float32,
                queries,
                g.head_dim,
                g.head_dim,
                1};
    }
};

}  // namespace mkernel::ascend::ring_attention
