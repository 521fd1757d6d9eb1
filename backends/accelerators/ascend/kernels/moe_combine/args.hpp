// MoE combine: results of experts come home. Data flow on rank r:
//   comm    rows of y that belong to another rank's tokens → that rank's inbox, where all its
//           results lie by owner, then place (other nodes: packed in the outbox, then a NIC put),
//           chunk by chunk of its tokens (comm.hpp).
//   vector  as soon as every owner's part of a chunk is here: for each token, over its slots in
//           order, weight * row, added in float32 and rounded once → out; own rows are read where
//           they are (vector.hpp).
// Which row is whose is in the tables that the dispatch's kernels wrote (moe/routing.hpp); a chunk
// is `rows_per_chunk` tokens of the home rank, whatever chunks the dispatch had. Sums run in slot
// order, so no number of blocks, chunks or ranks shows in the bits.
//
// Workspace of a rank:
//   inbox   [2 parities]: rows of its places in the order of `home`
//   outbox  [2 parities][world], where the world has several nodes: for each rank of another node,
//           its inbox as far as this rank fills it. The NIC has read it when the home rank has
//           released the call.
//
// Signals of the plan, from `signal_base` (call.hpp: parity, uses; release.hpp: the last two).
//   arrived(p, s, c)  +1 by rank s when its rows of the own chunk c are here
//   released(s)       by rank s when it has finished a call
//   finished          by each vector block of this rank's compute kernel
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
    // First token of a chunk.
    [[nodiscard]] constexpr std::uint32_t token(std::uint32_t chunk) const {
        const std::uint32_t token = chunk * rows_per_chunk;
        return token < routing.tokens ? token : routing.tokens;
    }

    // Bytes from the start of an inbox to a row.
    [[nodiscard]] constexpr std::uint64_t row_offset(std::uint32_t row) const {
        return std::uint64_t{row} * features * isa::bytes_of(dtype);
    }
    [[nodiscard]] constexpr std::uint64_t inbox(std::uint32_t parity) const {
        return parity * slot_aligned(row_offset(routing.places()));
    }
    [[nodiscard]] constexpr std::uint64_t outbox(std::uint32_t parity, std::uint32_t home) const {
        return inbox(2 + parity * world + home);
    }
    [[nodiscard]] constexpr std::uint64_t workspace_bytes() const {
        return world == 1 ? 0 : far ? outbox(2, 0) : inbox(2);
    }

    // Signal indices relative to the plan's first.
    [[nodiscard]] constexpr std::uint32_t arrived(std::uint32_t parity, std::uint32_t source,
                                                  std::uint32_t chunk) const {
        return (parity * world + source) * chunks() + chunk;
    }
    [[nodiscard]] constexpr std::uint32_t released(std::uint32_t rank) const {
        return arrived(2, 0, 0) + rank;
    }
    [[nodiscard]] constexpr std::uint32_t finished() const { return released(world); }
    [[nodiscard]] constexpr std::uint32_t signals() const { return finished() + 1; }
};

struct Args : CallArgs {
    Geometry geometry;
    isa::GlobalView y;        // [rows, features], rows contiguous; may have no rows
    isa::GlobalView weights;  // [tokens, top_k] float32, dense
    isa::GlobalView tables;   // [1, words] int32
    isa::GlobalView out;      // [tokens, features], rows contiguous

    [[nodiscard]] constexpr isa::GlobalView row(std::byte* inbox, std::uint32_t number) const {
        const Geometry& g = geometry;
        return {inbox + g.row_offset(number), g.dtype, 1, g.features, g.features, 1};
    }
};

}  // namespace mkernel::ascend::moe_combine
