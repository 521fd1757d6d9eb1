// GEMM+ReduceScatter and GEMM+AllReduce: the arguments of their kernels, and the geometry that they must
// agree on. Both sum W partial products, each at the tile's *owner*.
//
// Invariant sums (`segments`): K of all ranks has so many equal segments, of which a rank has as many as
// every other, its *leaves*. Each segment's product is rounded to `partial_dtype`, and a binary tree adds
// neighbours, whole segments of a rank first, rounding each sum to `partial_dtype`: so bits do not depend on
// where ranks begin. A rank's partial is the root of its leaves.
//
// Output tiles are tile_m x tile_n, numbered band by band of `band` row groups, within a band column by
// column: the tiles of a column of a band are computed at the same time, and a cube core whose next tile
// is of the next column keeps its rows of A (gemm/product.hpp). ReduceScatter: each rank owns the
// tiles of its own m / world rows. AllReduce (`replicated`): one numbering over all m rows, cut into
// `world` even runs of tiles. A chunk is `tiles_per_chunk` consecutive tiles of one owner, the last one
// shorter.
//
// A *slot* holds one rank's partial results, of `partial_dtype`, for all tiles of one owner, each
// tile dense in its valid size, one after another: a chunk is one contiguous range. Memory of a rank
// (call.hpp):
//   inbox   a slot for each other rank: the own tiles' partials from it. AllReduce: then finished
//           tiles, in the output's dtype, all of C: those of this rank, which ranks of its node get
//           from here, and those that owners of other nodes put here. Both are written without a wait
//           for a release: an owner has a result only after every rank has sent its partials of the
//           same call, that is after all calls of that rank before.
//   outbox  a slot for each rank: what this rank computed for that owner. AllReduce: then one for the
//           own finished tiles, for ranks of other nodes.
//   scratch  where vector cores add up leaves, for each leaf a slot for each rank.
//
// Words:
//   arrived(s, c)   remote: +1 by rank s when its part of the own chunk c is in the inbox
//   summed(t)       remote, AllReduce: +1 by its owner when the result of tile t is there, or here
//   computed(o, c)  local: +1 for each tile of owner o's chunk c in the outbox, or all leaves of it
//   finished        local: +1 by each communication block; in the view without communication by each
//                   block of the compute kernel (release.hpp)
#pragma once

#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::gemm_reduce {

// The place of an output tile in C as its owners together hold it: rows of A, columns of B.
struct Area {
    std::uint32_t row = 0, column = 0, rows = 0, columns = 0;
};

inline constexpr std::uint32_t kMostSegments = 1024;

struct Geometry {
    std::uint32_t world = 1;
    std::uint32_t m = 0, n = 0, k = 0;  // k: of one rank
    std::uint32_t tile_m = 0, tile_n = 0, tile_k = 0, step_k = 0, tiles_per_chunk = 1;
    bool replicated = false;
    isa::DType dtype = isa::DType::float16, out_dtype = isa::DType::float32;
    isa::DType partial_dtype = isa::DType::float32;  // or out_dtype; of invariant sums any
    std::uint32_t band = 1;                          // row groups
    std::uint32_t segments = 0;  // of K of all ranks; 0: ranks' partials are added in rank order

    // Returns how many results of each rank a tile's sum has.
    [[nodiscard]] constexpr std::uint32_t leaves() const {
        return segments > world ? segments / world : 1;
    }
    // Returns true where a rank's products are sums as they are.
    [[nodiscard]] constexpr bool complete() const {
        return world == 1 && leaves() == 1 &&
               (segments == 0 || partial_dtype == isa::DType::float32 ||
                partial_dtype == out_dtype);
    }
    // Returns true where vector cores add up leaves, which then lie in the scratch.
    [[nodiscard]] constexpr bool adds_leaves() const {
        return leaves() > 1 || (world == 1 && !complete());
    }
    [[nodiscard]] constexpr Tiling tiling() const { return {tile_m, tile_n, tile_k, step_k}; }
    // A grid of tiles: one an owner, or one for all.
    [[nodiscard]] constexpr std::uint32_t grid_rows() const { return replicated ? m : m / world; }
    [[nodiscard]] constexpr std::uint32_t n_tiles() const { return divide_up(n, tile_n); }
    [[nodiscard]] constexpr std::uint32_t grid_tiles() const {
        return divide_up(grid_rows(), tile_m) * n_tiles();
    }

    // The tiles of an owner are a run of a grid's tiles; `first` and everything named `tile` count in the
    // grid.
    [[nodiscard]] constexpr std::uint32_t first(std::uint32_t owner) const {
        if (!replicated) return 0;
        return static_cast<std::uint32_t>(std::uint64_t{grid_tiles()} * owner / world);
    }
    [[nodiscard]] constexpr std::uint32_t end(std::uint32_t owner) const {
        return replicated ? first(owner + 1) : grid_tiles();
    }
    // Returns the most chunks that an owner has.
    [[nodiscard]] constexpr std::uint32_t chunks() const {
        return divide_up(replicated ? divide_up(grid_tiles(), world) : grid_tiles(),
                         tiles_per_chunk);
    }
    // Return tiles [begin, end) of an owner's chunk; empty where it has fewer chunks.
    [[nodiscard]] constexpr std::uint32_t chunk_begin(std::uint32_t owner,
                                                      std::uint32_t chunk) const {
        const std::uint32_t at = first(owner) + chunk * tiles_per_chunk;
        return at < end(owner) ? at : end(owner);
    }
    [[nodiscard]] constexpr std::uint32_t chunk_end(std::uint32_t owner,
                                                    std::uint32_t chunk) const {
        return chunk_begin(owner, chunk + 1);
    }
    [[nodiscard]] constexpr std::uint32_t chunk_tiles(std::uint32_t owner,
                                                      std::uint32_t chunk) const {
        return chunk_end(owner, chunk) - chunk_begin(owner, chunk);
    }
    // Returns true where the other ranks send `owner` their part of a chunk of its own.
    [[nodiscard]] constexpr bool needs(std::uint32_t owner, std::uint32_t,
                                       std::uint32_t chunk) const {
        return chunk_tiles(owner, chunk) > 0;
    }

    [[nodiscard]] constexpr Area area(std::uint32_t owner, std::uint32_t tile) const {
        const Place at = place(tile);
        const std::uint32_t row = (at.first_group + at.group) * tile_m, column = at.column * tile_n;
        return {(replicated ? 0 : owner * grid_rows()) + row, column,
                part_of(grid_rows(), row, tile_m), part_of(n, column, tile_n)};
    }
    // Returns the elements of the grid before a tile.
    [[nodiscard]] constexpr std::uint64_t before(std::uint32_t tile) const {
        if (tile == grid_tiles()) return std::uint64_t{grid_rows()} * n;
        const Place at = place(tile);
        const std::uint32_t first = at.first_group * tile_m, column = at.column * tile_n;
        const std::uint32_t rows = part_of(grid_rows(), first, band * tile_m);
        return std::uint64_t{first} * n + std::uint64_t{rows} * column +
               std::uint64_t{at.group} * tile_m * part_of(n, column, tile_n);
    }

    // Returns the bytes from the start of an owner's slot to one of its tiles.
    [[nodiscard]] constexpr std::uint64_t tile_offset(std::uint32_t owner,
                                                      std::uint32_t tile) const {
        return (before(tile) - before(first(owner))) * isa::bytes_of(partial_dtype);
    }
    [[nodiscard]] constexpr Range chunk_range(std::uint32_t owner, std::uint32_t chunk) const {
        const std::uint64_t begin = tile_offset(owner, chunk_begin(owner, chunk));
        return {begin, tile_offset(owner, chunk_end(owner, chunk)) - begin};
    }
    [[nodiscard]] constexpr std::uint64_t slot_bytes() const {
        return slot_aligned(most_owned() * isa::bytes_of(partial_dtype));
    }
    // Returns the most elements that an owner has.
    [[nodiscard]] constexpr std::uint64_t most_owned() const {
        std::uint64_t most = 0;
        for (std::uint32_t owner = 0; owner < world; ++owner) {
            const std::uint64_t elements = before(end(owner)) - before(first(owner));
            most = elements > most ? elements : most;
        }
        return most;
    }
    // Return the bytes from the start of `owner`'s inbox to the partials of `source`, and from the start of
    // any inbox to a finished tile.
    [[nodiscard]] constexpr std::uint64_t inbox(std::uint32_t owner, std::uint32_t source) const {
        return slot_of(owner, source) * slot_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t result_offset(std::uint32_t tile) const {
        return (world - 1) * slot_bytes() + before(tile) * isa::bytes_of(out_dtype);
    }
    // Return the same for the outbox: to partials for `owner`, and to a finished tile of `rank`'s own.
    [[nodiscard]] constexpr std::uint64_t outbox(std::uint32_t owner) const {
        return owner * slot_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t own_result_offset(std::uint32_t rank,
                                                            std::uint32_t tile) const {
        return outbox(world) + (before(tile) - before(first(rank))) * isa::bytes_of(out_dtype);
    }
    [[nodiscard]] constexpr std::uint64_t inbox_bytes() const {
        if (world == 1) return 0;
        return slot_aligned(result_offset(replicated ? grid_tiles() : 0));
    }
    [[nodiscard]] constexpr std::uint64_t outbox_bytes() const {
        if (world == 1) return 0;
        const std::uint64_t finished = replicated ? most_owned() * isa::bytes_of(out_dtype) : 0;
        return outbox(world) + slot_aligned(finished);
    }
    [[nodiscard]] constexpr std::uint64_t scratch_bytes() const {
        return adds_leaves() ? leaves() * leaf_stride() : 0;
    }
    // Returns the bytes from a leaf's partials, which lie as those of the outbox do, to the next one's.
    [[nodiscard]] constexpr std::uint64_t leaf_stride() const { return outbox(world); }

    [[nodiscard]] constexpr Remote arrived(std::uint32_t source, std::uint32_t chunk) const {
        return {source * chunks() + chunk};
    }
    [[nodiscard]] constexpr Remote summed(std::uint32_t tile) const {
        return {arrived(world, 0).number + tile};
    }
    [[nodiscard]] constexpr Local finished() const { return {0}; }
    [[nodiscard]] constexpr Local computed(std::uint32_t owner, std::uint32_t chunk) const {
        return {1 + owner * chunks() + chunk};
    }
    [[nodiscard]] constexpr std::uint64_t words() const {
        return words_needed(summed(replicated ? grid_tiles() : 0).number,
                            computed(world, 0).number);
    }

    struct Place {
        std::uint32_t first_group = 0, group = 0, column = 0;  // of the band; in it; of tiles
    };
    [[nodiscard]] constexpr Place place(std::uint32_t tile) const {
        const std::uint32_t first = tile / (band * n_tiles()) * band;
        const std::uint32_t height = part_of(divide_up(grid_rows(), tile_m), first, band);
        const std::uint32_t within = tile - first * n_tiles();
        return {first, within % height, within / height};
    }
};

struct Args : CallArgs {
    Geometry geometry;
    isa::GlobalView a;    // [m, k], rows contiguous
    isa::GlobalView b;    // [k, n], rows or columns contiguous
    isa::GlobalView out;  // [m / world or m, n], rows contiguous

    // Returns the tile of `owner`, dense in `slot`.
    [[nodiscard]] constexpr isa::GlobalView partial(std::byte* slot, std::uint32_t owner,
                                                    std::uint32_t tile) const {
        return dense(slot + geometry.tile_offset(owner, tile), geometry.partial_dtype, tile);
    }
    // Returns a finished tile in an inbox, of its owner or from a rank of another node.
    [[nodiscard]] constexpr isa::GlobalView result(std::byte* inbox_of, std::uint32_t tile) const {
        return dense(inbox_of + geometry.result_offset(tile), geometry.out_dtype, tile);
    }
    // Returns one of the own finished tiles in the outbox.
    [[nodiscard]] constexpr isa::GlobalView own_result(std::uint32_t tile) const {
        return dense(outbox + geometry.own_result_offset(rank, tile), geometry.out_dtype, tile);
    }
    // Returns the tile of `owner` in the user's output: any owner's where it is replicated, else the own
    // ones.
    [[nodiscard]] constexpr isa::GlobalView output(std::uint32_t tile) const {
        const Area at = geometry.area(0, tile);
        return out.sub(at.row, at.column, at.rows, at.columns);
    }

  private:
    [[nodiscard]] constexpr isa::GlobalView dense(std::byte* base, isa::DType dtype,
                                                  std::uint32_t tile) const {
        const Area at = geometry.area(0, tile);
        return {base, dtype, at.rows, at.columns, at.columns, 1};
    }
};

}  // namespace mkernel::ascend::gemm_reduce
