// Tiles and global-memory views, the operands of instructions of the tile ISA.
//
// They are plain data, passed by value. A tile is a rectangle in one on-chip buffer of one core; its first
// byte lies `offset` bytes into that buffer *in the tile's own dtype*, so buffer capacity is counted the way
// hardware counts it. A view is a rectangle of global memory (GM) with element strides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mkernel::ascend::isa {

// int32 is for tables: moved, and read and written by scalar instructions, never computed with.
enum class DType : std::uint8_t { float16 = 0, bfloat16 = 1, float32 = 2, int32 = 3 };

constexpr std::uint32_t bytes_of(DType dtype) {
    return dtype == DType::float32 || dtype == DType::int32 ? 4 : 2;
}

constexpr const char* name_of(DType dtype) {
    constexpr const char* kNames[] = {"float16", "bfloat16", "float32", "int32"};
    return kNames[static_cast<int>(dtype)];
}

enum class Buffer : std::uint8_t { L1 = 0, L0A = 1, L0B = 2, L0C = 3, UB = 4 };
inline constexpr int kBuffers = 5;

constexpr const char* name_of(Buffer buffer) {
    constexpr const char* kNames[] = {"L1", "L0A", "L0B", "L0C", "UB"};
    return kNames[static_cast<int>(buffer)];
}

// Returns the bytes of each buffer of a core (A2/A3 class).
constexpr std::uint32_t capacity_of(Buffer buffer) {
    constexpr std::uint32_t kBytes[] = {512 << 10, 64 << 10, 64 << 10, 128 << 10, 192 << 10};
    return kBytes[static_cast<int>(buffer)];
}

// The layout of the elements of an L1 or UB tile: `row`: columns contiguous; `column`: rows contiguous. L0
// tiles have the matrix unit's own layout, which no kernel may assume.
enum class Layout : std::uint8_t { row = 0, column = 1 };

struct Tile {
    Buffer buffer = Buffer::L1;
    DType dtype = DType::float16;
    Layout layout = Layout::row;
    std::uint32_t offset = 0;  // bytes from the start of the buffer
    std::uint32_t rows = 0, cols = 0;
    std::uint32_t valid_rows = 0,
                  valid_cols = 0;  // the part that holds data; the rest is unspecified

    [[nodiscard]] constexpr std::uint32_t bytes() const { return rows * cols * bytes_of(dtype); }

    // Returns a tile at the same place with another valid part.
    [[nodiscard]] constexpr Tile with_valid(std::uint32_t r, std::uint32_t c) const {
        Tile tile = *this;
        tile.valid_rows = r;
        tile.valid_cols = c;
        return tile;
    }
};

struct GlobalView {
    std::byte* base = nullptr;
    DType dtype = DType::float16;
    std::uint32_t rows = 0, cols = 0;
    std::int64_t row_stride = 0, col_stride = 1;  // in elements; one of the two is 1

    [[nodiscard]] constexpr std::byte* at(std::int64_t row, std::int64_t col) const {
        return base + (row * row_stride + col * col_stride) * bytes_of(dtype);
    }
    [[nodiscard]] constexpr GlobalView sub(std::int64_t row, std::int64_t col, std::uint32_t r,
                                           std::uint32_t c) const {
        return {at(row, col), dtype, r, c, row_stride, col_stride};
    }
};

// The whole of UB as the two halves that a TPUT of rows takes.
struct RowBuffers {
    RowBuffers(DType dtype, std::uint32_t width)
        : ping{.buffer = Buffer::UB,
               .dtype = dtype,
               .rows = capacity_of(Buffer::UB) / 2 / (width * bytes_of(dtype)),
               .cols = width},
          pong(ping) {
        pong.offset = capacity_of(Buffer::UB) / 2;
    }
    Tile ping, pong;
};

}  // namespace mkernel::ascend::isa
