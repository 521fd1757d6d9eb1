// MoE combine: results of experts come home. Data flow on rank r:
//   comm    rows of y that belong to another rank's tokens → that rank's inbox, where all its
//           results lie by owner, then place (other nodes: packed in the outbox, then a NIC put),
//           chunk by chunk of its tokens (comm.hpp).
//   vector  as soon as every owner's part of a chunk is here: for each token, over its slots in
//           order, weight * row, added in float32 and rounded once → out; own rows are read where
//           they are (vector.hpp).
// The owners of rows are in the tables that the dispatch's kernels wrote (moe/routing.hpp); a chunk is
// `rows_per_chunk` tokens of the home rank, whatever chunks the dispatch had. Sums run in slot order, so no
// number of blocks, chunks or ranks shows in the bits.
//
// Memory of a rank (call.hpp):
//   inbox   rows of its places in the order of `home`
//   outbox  where the world has several nodes, for each other rank: its inbox as far as this rank fills
//           it, if it is on another node
//
// Words:
//   arrived(s, c)  remote: +1 by rank s when its rows of the own chunk c are here
//   finished       local: +1 by each vector block of the compute kernel (release.hpp)
#pragma once

#include "backends/accelerators/ascend/kernels/moe/routing.hpp"

namespace mkernel::ascend::moe_combine {

struct Geometry {
    moe::Routing routing;
    std::uint32_t world = 1;  // as in `routing`
    std::uint32_t features = 0;
    std::uint32_t rows_per_chunk = 1;
    bool far = false;  // some ranks are on other nodes
    isa::DType dtype = isa::DType::float16, out_dtype = isa::DType::float16;

    [[nodiscard]] constexpr std::uint32_t chunks() const {
        return divide_up(routing.tokens, rows_per_chunk);
    }
    // Returns the first token of a chunk.
    [[nodiscard]] constexpr std::uint32_t token(std::uint32_t chunk) const {
        const std::uint32_t token = chunk * rows_per_chunk;
        return token < routing.tokens ? token : routing.tokens;
    }

    // Returns the bytes from the start of an inbox to a row.
    [[nodiscard]] constexpr std::uint64_t row_offset(std::uint32_t row) const {
        return std::uint64_t{row} * features * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr std::uint64_t inbox_bytes() const {
        return world == 1 ? 0 : slot_aligned(row_offset(routing.places()));
    }
    // Returns the bytes from the start of `rank`'s outbox to the data for `home`.
    [[nodiscard]] constexpr std::uint64_t outbox(std::uint32_t rank, std::uint32_t home) const {
        return slot_of(rank, home) * inbox_bytes();
    }
    [[nodiscard]] constexpr std::uint64_t outbox_bytes() const {
        return far ? (world - 1) * inbox_bytes() : 0;
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
    isa::GlobalView y;        // [rows, features], rows contiguous; may have no rows. Where some own
                              // places have no owner, the last row is zero, and theirs
    isa::GlobalView weights;  // [tokens, top_k] float32, dense
    isa::GlobalView tables;   // [1, words] int32
    isa::GlobalView out;      // [tokens, features], rows contiguous

    [[nodiscard]] constexpr isa::GlobalView row(std::byte* base, std::uint32_t number) const {
        const Geometry& g = geometry;
        return {base + g.row_offset(number), g.dtype, 1, g.features, g.features, 1};
    }
};

}  // namespace mkernel::ascend::moe_combine
