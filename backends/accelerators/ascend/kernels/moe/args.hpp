// MoE dispatch+GEMM. Data flow on rank r:
//   comm    own topk_ids → every other rank's inbox; then tokens, once for each rank that has
//           experts of theirs: rows of x → that rank's inbox (other nodes: packed in the outbox,
//           then a NIC put), chunk by chunk, in token order (comm.hpp).
//   vector  ids of all ranks, one source a block → routing tables in memory (tables.hpp); as each
//           chunk comes, its tokens → the rows of their experts, own tokens straight from x
//           (vector.hpp).
//   cube    tiles of an expert's rows @ w[expert] → out, each as soon as the chunks that fill its
//           rows are spread (cube.hpp).
// An expert's rows come by source rank, token, slot: fixed by the routing alone.
//
// A chunk is `rows_per_chunk` tokens of one rank, of which those that another rank needs go there,
// one after another from where the chunk's first token lies in the slot. Chunks are signalled even
// if none goes: what a call adds to each word is fixed. Memory of a rank (call.hpp), each slot being
// ids, then tokens:
//   inbox   a slot for each other rank: what comes from it
//   outbox  where the world has several nodes, the same: what goes to it, if on another node
//
// Words:
//   ids(s)         remote: +1 by rank s when its ids are here
//   arrived(s, c)  remote: +1 by rank s when chunk c of its tokens is here
//   counted        local: +1 for each chunk of every source when its places are counted
//   placed         local: +1 for each source when their rows are known
//   spread(s, c)   local: +1 when the tokens of chunk c of source s are in their rows
//   finished       local: +1 by each vector block of the compute kernel (release.hpp)
#pragma once

#include "backends/accelerators/ascend/kernels/moe/routing.hpp"

namespace mkernel::ascend::moe {

struct Geometry {
    Routing routing;
    std::uint32_t world = 1;  // as in `routing`
    std::uint32_t hidden = 0, features = 0;
    std::uint32_t rows_per_chunk = 1;
    bool far = false;  // some ranks are on other nodes
    std::uint32_t tile_m = 0, tile_n = 0, tile_k = 0, step_k = 0;
    isa::DType dtype = isa::DType::float16;

    [[nodiscard]] constexpr Tiling tiling() const { return {tile_m, tile_n, tile_k, step_k}; }
    [[nodiscard]] constexpr std::uint32_t chunks() const {
        return divide_up(routing.tokens, rows_per_chunk);
    }
    // Returns the first token of a chunk.
    [[nodiscard]] constexpr std::uint32_t token(std::uint32_t chunk) const {
        const std::uint32_t token = chunk * rows_per_chunk;
        return token < routing.tokens ? token : routing.tokens;
    }
    [[nodiscard]] constexpr std::uint32_t n_tiles() const { return divide_up(features, tile_n); }

    // Returns the bytes from the start of a slot to a token.
    [[nodiscard]] constexpr std::uint64_t token_offset(std::uint32_t token) const {
        return slot_aligned(std::uint64_t{routing.places()} * sizeof(std::int32_t)) +
               std::uint64_t{token} * hidden * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr std::uint64_t slot_bytes() const {
        return slot_aligned(token_offset(routing.tokens));
    }
    // Returns the bytes from the start of a rank's inbox, or outbox, to the slot of another one.
    [[nodiscard]] constexpr std::uint64_t slot(std::uint32_t rank, std::uint32_t other) const {
        return slot_of(rank, other) * slot_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t inbox_bytes() const { return (world - 1) * slot_bytes(); }
    [[nodiscard]] constexpr std::uint64_t outbox_bytes() const { return far ? inbox_bytes() : 0; }
    [[nodiscard]] constexpr std::uint64_t scratch_bytes() const { return 0; }

    // Words of this call's tables, which follow the routing's: the relation of chunks to rows.
    //   here[world][chunks]                places of a chunk that have their row here
    //   lower[world][chunks]               those that have a lower owner
    //   count[world][chunks][experts]      rows that each own expert gets of a chunk
    //   first[world][chunks + 1][experts]  first row of each expert that a chunk fills, and the end
    //   next[world][chunks][experts]       the next one, while the chunk is spread
    //   owned[chunks][world]               own places of a chunk that each rank owns
    //   found[world][places]               from each chunk's first place on, those that have their
    //                                      row here
    [[nodiscard]] constexpr std::uint64_t here(std::uint32_t source, std::uint32_t chunk) const {
        return routing.words() + std::uint64_t{source} * chunks() + chunk;
    }
    [[nodiscard]] constexpr std::uint64_t lower(std::uint32_t source, std::uint32_t chunk) const {
        return here(world, 0) + std::uint64_t{source} * chunks() + chunk;
    }
    [[nodiscard]] constexpr std::uint64_t count(std::uint32_t source, std::uint32_t chunk,
                                                std::uint32_t expert) const {
        return lower(world, 0) + (std::uint64_t{source} * chunks() + chunk) * routing.experts +
               expert;
    }
    [[nodiscard]] constexpr std::uint64_t first(std::uint32_t source, std::uint32_t chunk,
                                                std::uint32_t expert) const {
        return count(world, 0, 0) +
               (std::uint64_t{source} * (chunks() + 1) + chunk) * routing.experts + expert;
    }
    [[nodiscard]] constexpr std::uint64_t next(std::uint32_t source, std::uint32_t chunk,
                                               std::uint32_t expert) const {
        return first(world, 0, 0) + (std::uint64_t{source} * chunks() + chunk) * routing.experts +
               expert;
    }
    [[nodiscard]] constexpr std::uint64_t owned(std::uint32_t chunk, std::uint32_t owner) const {
        return next(world, 0, 0) + std::uint64_t{chunk} * world + owner;
    }
    [[nodiscard]] constexpr std::uint64_t found(std::uint32_t source, std::uint32_t place) const {
        return owned(chunks(), 0) + std::uint64_t{source} * routing.places() + place;
    }
    [[nodiscard]] constexpr std::uint64_t table_words() const { return found(world, 0); }

    [[nodiscard]] constexpr Remote ids(std::uint32_t source) const { return {source}; }
    [[nodiscard]] constexpr Remote arrived(std::uint32_t source, std::uint32_t chunk) const {
        return {world + source * chunks() + chunk};
    }
    [[nodiscard]] constexpr Local finished() const { return {0}; }
    [[nodiscard]] constexpr Local counted() const { return {1}; }
    [[nodiscard]] constexpr Local placed() const { return {2}; }
    [[nodiscard]] constexpr Local spread(std::uint32_t source, std::uint32_t chunk) const {
        return {3 + source * chunks() + chunk};
    }
    [[nodiscard]] constexpr std::uint64_t words() const {
        return words_needed(arrived(world, 0).number, spread(world, 0).number);
    }
};

struct Chunk {
    std::uint32_t source = 0, number = 0;
};

struct Args : CallArgs {
    Geometry geometry;
    isa::GlobalView x;        // [tokens, hidden], rows contiguous
    isa::GlobalView own_ids;  // [places, 1] int32; of int64 the low words
    isa::GlobalView w;        // row-major [experts * hidden, features] or column-major
                              // [hidden, experts * features]
    isa::GlobalView grouped;  // [most_rows, hidden]: tokens in the rows of their experts
    isa::GlobalView out;      // [most_rows, features]
    isa::GlobalView tables;   // [1, table_words] int32
    isa::GlobalView routing;  // a record: [world, places] int32, the ids of all ranks; else null

    [[nodiscard]] constexpr isa::GlobalView weights(std::uint32_t expert) const {
        const Geometry& g = geometry;
        return w.col_stride == 1
                   ? w.sub(std::int64_t{expert} * g.hidden, 0, g.hidden, g.features)
                   : w.sub(0, std::int64_t{expert} * g.features, g.hidden, g.features);
    }
    // Return the ids and tokens in a slot.
    [[nodiscard]] constexpr isa::GlobalView slot_ids(std::byte* slot) const {
        return {slot, isa::DType::int32, geometry.routing.places(), 1, 1, 1};
    }
    [[nodiscard]] constexpr isa::GlobalView slot_tokens(std::byte* slot, std::uint32_t token,
                                                        std::uint32_t count) const {
        const Geometry& g = geometry;
        return {slot + g.token_offset(token), g.dtype, count, g.hidden, g.hidden, 1};
    }
    [[nodiscard]] constexpr std::byte* received(std::uint32_t source) const {
        return inbox + geometry.slot(rank, source);
    }
    // Returns a token of `source`, which came as number `at` of its slot.
    [[nodiscard]] constexpr isa::GlobalView token(std::uint32_t source, std::uint32_t token,
                                                  std::uint32_t at) const {
        return source == rank ? x.sub(token, 0, 1, geometry.hidden)
                              : slot_tokens(received(source), at, 1);
    }
    // Returns a chunk by its number in the order in which chunks are worked on: the own ones, which are here
    // at once, then the other ranks' as they come, the first one of each, the second one of each, ...
    [[nodiscard]] constexpr Chunk chunk(std::uint32_t item) const {
        const std::uint32_t own = geometry.chunks(), others = geometry.world - 1;
        if (item < own) return {rank, item};
        return {order[1 + (item - own) % others], (item - own) / others};
    }
    // Returns where the ids of `source` are once they are here; without communication, the own ones for all.
    [[nodiscard]] constexpr isa::GlobalView ids(std::uint32_t source) const {
        if (source == rank || compute_only) return own_ids;
        return slot_ids(routing.base != nullptr ? routing.at(source, 0) : received(source));
    }
};

}  // namespace mkernel::ascend::moe
