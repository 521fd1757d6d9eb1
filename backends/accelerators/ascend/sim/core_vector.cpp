// Vector instructions of a core: element by element on tiles in UB, pipe V.
#include "backends/accelerators/ascend/sim/core.hpp"
#include "backends/accelerators/ascend/sim/number.hpp"

namespace mkernel::ascend::sim {

using isa::Buffer;
using isa::DType;
using isa::Layout;
using isa::Pipe;
using isa::Tile;

// A UB tile whose rows lie apart like those of `shape` and hold as much.
std::byte* Core::check_vector(const char* instruction, const Tile& tile, const Tile& shape) const {
    std::byte* memory = check(instruction, tile);
    if (tile.buffer != Buffer::UB || tile.layout != Layout::row) {
        fail(instruction, describe(tile) + ": vector instructions take row-major tiles in UB");
    }
    if (tile.cols != shape.cols || tile.valid_rows != shape.valid_rows ||
        tile.valid_cols != shape.valid_cols) {
        fail(instruction, "shapes do not match: " + describe(tile) + ", " + describe(shape));
    }
    return memory;
}

void Core::tadd(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    std::byte* sum = check_vector("TADD", c, c);
    const std::byte* left = check_vector("TADD", a, c);
    const std::byte* right = check_vector("TADD", b, c);
    for (const Tile& tile : {c, a, b}) {
        if (tile.dtype != DType::float32) fail("TADD", describe(tile) + ": takes float32 tiles");
    }
    execute("TADD", Pipe::V, {reads(a), reads(b), writes(c)}, [=] {
        for (std::size_t row = 0; row < c.valid_rows; ++row) {
            const std::size_t start = row * c.cols;
            auto* out = reinterpret_cast<float*>(sum) + start;
            const auto* x = reinterpret_cast<const float*>(left) + start;
            const auto* y = reinterpret_cast<const float*>(right) + start;
            for (std::size_t i = 0; i < c.valid_cols; ++i) out[i] = x[i] + y[i];
        }
    });
    record({.kind = Kind::tadd,
            .pipe = Pipe::V,
            .chunk = chunk_,
            .peer = environment_.rank,
            .amount = std::uint64_t{c.valid_rows} * c.valid_cols * bytes_of(c.dtype)});
}

void Core::tcvt(const Tile& to, const Tile& from, Where where) {
    where_ = where;
    std::byte* out = check_vector("TCVT", to, from);
    const std::byte* in = check_vector("TCVT", from, from);
    if (from.dtype != DType::float32) fail("TCVT", describe(from) + ": converts from float32");
    execute("TCVT", Pipe::V, {reads(from), writes(to)}, [=] {
        for (std::size_t row = 0; row < to.valid_rows; ++row) {
            narrow_run(out + row * to.cols * bytes_of(to.dtype), to.dtype,
                       reinterpret_cast<const float*>(in) + row * from.cols, to.valid_cols);
        }
    });
    record({.kind = Kind::tcvt,
            .pipe = Pipe::V,
            .chunk = chunk_,
            .peer = environment_.rank,
            .amount = std::uint64_t{from.valid_rows} * from.valid_cols * bytes_of(from.dtype)});
}

}  // namespace mkernel::ascend::sim
