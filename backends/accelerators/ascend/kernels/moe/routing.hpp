// MoE: the routing tables of a rank, which the dispatch's kernels write and the combine's read.
//
// A *place* is (token, slot of top-k), numbered token by token. Experts are cut evenly over the
// ranks; numbers that name no expert have no owner, and their places no row. Tables are int32 words
// in global memory, in this order:
//   base[experts + 1]         first row of each own expert; the last one: rows in all
//   begin[world][tokens + 1]  of each source, how many places before a token have their row here
//   start[world]              of each source, how many of its places have a lower owner than this
//   rows[world][places]       of each source, the row of each of its places here, in their order
//   home[places]              of each own place: how many own places come before it by owner, then
//                             place; results come home in this order
//   homes                     how many own places have an owner
#pragma once

#include <cstdint>

#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::moe {

struct Routing {
    std::uint32_t world = 1;
    std::uint32_t tokens = 0;  // of each rank
    std::uint32_t top_k = 1;
    std::uint32_t experts = 1;  // of each rank

    [[nodiscard]] constexpr std::uint32_t places() const { return tokens * top_k; }
    // Returns the most rows that a rank's experts can get.
    [[nodiscard]] constexpr std::uint32_t most_rows() const { return world * places(); }
    // Returns the rank that has expert `id`; `world` where no rank has it.
    [[nodiscard]] constexpr std::uint32_t owner(std::int32_t id) const {
        const std::uint32_t owner = static_cast<std::uint32_t>(id) / experts;
        return id >= 0 && owner < world ? owner : world;
    }

    // Indices of words.
    [[nodiscard]] constexpr std::uint64_t base(std::uint32_t expert) const { return expert; }
    [[nodiscard]] constexpr std::uint64_t begin(std::uint32_t source, std::uint32_t token) const {
        return base(experts + 1) + std::uint64_t{source} * (tokens + 1) + token;
    }
    [[nodiscard]] constexpr std::uint64_t start(std::uint32_t source) const {
        return begin(world, 0) + source;
    }
    [[nodiscard]] constexpr std::uint64_t rows(std::uint32_t source, std::uint32_t place) const {
        return start(world) + std::uint64_t{source} * places() + place;
    }
    [[nodiscard]] constexpr std::uint64_t home(std::uint32_t place) const {
        return rows(world, 0) + place;
    }
    [[nodiscard]] constexpr std::uint64_t homes() const { return home(places()); }
    [[nodiscard]] constexpr std::uint64_t words() const { return homes() + 1; }
};

// Words of a table through a core's scalar instructions.
template <class Core>
class Words {
  public:
    Words(Core& core, std::byte* base, std::uint64_t stride = 1)
        : core_(core), base_(base), step_(stride * sizeof(std::int32_t)) {}

    [[nodiscard]] std::int32_t get(std::uint64_t index) const {
        return core_.sload(base_ + index * step_);
    }
    [[nodiscard]] std::uint32_t count(std::uint64_t index) const {
        return static_cast<std::uint32_t>(get(index));
    }
    void set(std::uint64_t index, std::uint32_t value) const {
        core_.sstore(base_ + index * step_, static_cast<std::int32_t>(value));
    }
    // Adds one; returns the value before.
    std::uint32_t next(std::uint64_t index) const {
        const std::uint32_t value = count(index);
        set(index, value + 1);
        return value;
    }

  private:
    Core& core_;
    std::byte* base_;
    std::uint64_t step_;
};

}  // namespace mkernel::ascend::moe
