// The last accesses of bytes of a core's buffers, and of global memory as this core sees it. Checks return
// the first error of an access, in words; an empty string if there is none.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/sim/strict_order.hpp"

namespace mkernel::ascend::sim {

// A line of a kernel's source.
struct Line {
    Line() = default;
    Line(const char* its_file, std::uint32_t its_line) : file(its_file), line(its_line) {}
    Line(const std::source_location& where)  // NOLINT: what instructions are given
        : Line(where.file_name(), where.line()) {}
    const char* file = "";
    std::uint32_t line = 0;
};

// An instruction in a kernel's source.
struct Site {
    const char* instruction = "";
    Line where;
};

// "compute.hpp:75"
std::string place(const Line& where);
// "TLOAD (pipe MTE2, compute.hpp:75)"
std::string describe(const Site& site, isa::Pipe pipe);

// The operand that an instruction reads or writes: rows x cols elements of a tile from (row, col) on, or a
// view.
struct Operand {
    enum class Kind : std::uint8_t { tile, global } kind = Kind::tile;
    bool write = false;
    isa::Tile tile{};
    std::uint32_t row = 0, col = 0, rows = 0, cols = 0;
    isa::GlobalView view{};
};

constexpr Operand reads(const isa::Tile& tile, std::uint32_t row, std::uint32_t col,
                        std::uint32_t rows, std::uint32_t cols) {
    return {.tile = tile, .row = row, .col = col, .rows = rows, .cols = cols};
}
constexpr Operand reads(const isa::Tile& tile) {
    return reads(tile, 0, 0, tile.valid_rows, tile.valid_cols);
}
constexpr Operand writes(const isa::Tile& tile) {
    return {.write = true, .tile = tile, .rows = tile.valid_rows, .cols = tile.valid_cols};
}
constexpr Operand reads(const isa::GlobalView& view) {
    return {.kind = Operand::Kind::global, .view = view};
}
constexpr Operand writes(const isa::GlobalView& view) {
    return {.kind = Operand::Kind::global, .write = true, .view = view};
}

// Returns true where two views have a byte in common.
bool overlap(const isa::GlobalView& first, const isa::GlobalView& second);
// Returns the byte after a view's last.
const std::byte* end_of(const isa::GlobalView& view);
// "8192 bytes of global memory at 140737 (64x64 float16)"
std::string describe(const isa::GlobalView& view);

class Ranges {
  public:
    // Checks the access of instruction `at` (its tick) of `pipe`.
    std::string access(const Order& order, const Site& site, isa::Pipe pipe, std::uint32_t at,
                       const Operand& operand);
    // Returns the first access of global memory that may still be under way for a core that S signals: a
    // write since the last fence, or, where `reads`, a read that S is not ordered after.
    [[nodiscard]] std::string unpublished(const Order& order, bool reads) const;
    // Calls `read` for each read that S is not ordered after.
    using Read = std::function<void(const Site&, isa::Pipe, const isa::GlobalView&)>;
    void each_pending_read(const Order& order, const Read& read) const;
    // Marks everything that this pipe (ALL: any) did to global memory as done and visible.
    void fence(isa::Pipe pipe);

  private:
    struct Access {
        isa::Pipe pipe = isa::Pipe::S;
        std::uint32_t at = 0;  // 0: none
        Site site;
    };
    struct Written : Access {
        isa::Tile tile;
        bool read = false;  // any byte of it
    };
    struct Segment {
        std::uint32_t end = 0;
        std::shared_ptr<Written> written;  // null: never
        std::array<Access, isa::kPipes> readers{};
    };
    // Disjoint, by first byte.
    using Segments = std::map<std::uint32_t, Segment>;
    struct GlobalAccess : Access {
        bool write = false;
        isa::GlobalView view{};
        const std::byte* end = nullptr;  // of `view`: most accesses lie apart, as it tells at once
    };

    std::string tile_access(const Order& order, const Access& now, const Operand& operand);
    std::string global_access(const Order& order, const Access& now, const Operand& operand);
    static void cut(Segments& segments, std::uint32_t at);

    Segments buffers_[isa::kBuffers];
    std::vector<GlobalAccess> reads_, writes_;  // of global memory, since the last fence
};

}  // namespace mkernel::ascend::sim
