// Vector instructions of a core: on tiles in UB, pipe V.
#include <cmath>
#include <limits>
#include <tuple>

#include "backends/accelerators/ascend/sim/core.hpp"
#include "backends/accelerators/ascend/sim/number.hpp"

namespace mkernel::ascend::sim {

using isa::Buffer;
using isa::DType;
using isa::Layout;
using isa::Pipe;
using isa::Tile;

namespace {

// The valid part of a tile as runs of elements; one run where nothing lies between its rows.
struct Runs {
    explicit Runs(const Tile& tile)
        : count(tile.valid_cols == tile.cols ? 1 : tile.valid_rows),
          length(std::size_t{tile.valid_cols} * (count == 1 ? tile.valid_rows : 1)),
          pitch(tile.cols) {}
    std::size_t count, length, pitch;
};

}  // namespace

std::byte* Core::vector_tile(Kind kind, const Tile& tile, const Tile& shape) const {
    std::byte* memory = check(name_of(kind), tile);
    if (tile.buffer != Buffer::UB || tile.layout != Layout::row) {
        fail(name_of(kind), describe(tile) + ": vector instructions take row-major tiles in UB");
    }
    if (tile.dtype == DType::int32) fail(name_of(kind), describe(tile) + ": takes no int32");
    if (tile.cols != shape.cols || tile.valid_rows != shape.valid_rows ||
        tile.valid_cols != shape.valid_cols) {
        fail(name_of(kind), "shapes do not match: " + describe(tile) + ", " + describe(shape));
    }
    return memory;
}

float* Core::float_tile(Kind kind, const Tile& tile, const Tile& shape) const {
    std::byte* memory = vector_tile(kind, tile, shape);
    if (tile.dtype != DType::float32) {
        fail(name_of(kind), describe(tile) + ": takes float32 tiles");
    }
    return reinterpret_cast<float*>(memory);
}

// [shape's valid rows, 1], densely packed.
float* Core::float_column(Kind kind, const Tile& tile, const Tile& shape) const {
    Tile column = shape;
    column.cols = column.valid_cols = 1;
    return float_tile(kind, tile, column);
}

void Core::record_vector(Kind kind, const Tile& work) {
    record_work(kind, Pipe::V,
                std::uint64_t{work.valid_rows} * work.valid_cols * bytes_of(DType::float32));
}

template <class Element, class... Inputs>
void Core::elementwise(Kind kind, const Element& element, const Tile& c, const Inputs&... inputs) {
    float* const out = float_tile(kind, c, c);
    const std::tuple memory{float_tile(kind, inputs, c)...};
    execute(name_of(kind), Pipe::V, {reads(inputs)..., writes(c)}, [=] {
        const Runs runs(c);
        for (std::size_t run = 0; run < runs.count; ++run) {
            const std::size_t start = run * runs.pitch;
            std::apply(
                [&](const auto*... in) {
                    for (std::size_t i = start; i < start + runs.length; ++i) {
                        out[i] = element(in[i]...);
                    }
                },
                memory);
        }
    });
    record_vector(kind, c);
}

void Core::tadd(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    elementwise(Kind::tadd, [](float x, float y) { return x + y; }, c, a, b);
}

void Core::tsub(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    elementwise(Kind::tsub, [](float x, float y) { return x - y; }, c, a, b);
}

void Core::tmul(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    elementwise(Kind::tmul, [](float x, float y) { return x * y; }, c, a, b);
}

void Core::tmax(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    elementwise(Kind::tmax, [](float x, float y) { return x > y ? x : y; }, c, a, b);
}

void Core::tmuls(const Tile& c, const Tile& a, float factor, Where where) {
    where_ = where;
    elementwise(Kind::tmuls, [factor](float x) { return x * factor; }, c, a);
}

void Core::texp(const Tile& c, const Tile& a, Where where) {
    where_ = where;
    elementwise(Kind::texp, [](float x) { return std::exp(x); }, c, a);
}

void Core::tlog(const Tile& c, const Tile& a, Where where) {
    where_ = where;
    elementwise(Kind::tlog, [](float x) { return std::log(x); }, c, a);
}

void Core::tfill(const Tile& c, float value, Where where) {
    where_ = where;
    elementwise(Kind::tfill, [value] { return value; }, c);
}

void Core::ttril(const Tile& c, const Tile& a, std::int32_t diagonal, float otherwise,
                 Where where) {
    where_ = where;
    float* const out = float_tile(Kind::ttril, c, c);
    const float* const in = float_tile(Kind::ttril, a, c);
    execute(name_of(Kind::ttril), Pipe::V, {reads(a), writes(c)}, [=] {
        for (std::int64_t row = 0; row < c.valid_rows; ++row) {
            for (std::int64_t col = 0; col < c.valid_cols; ++col) {
                const std::int64_t at = row * c.cols + col;
                out[at] = col <= row + diagonal ? in[at] : otherwise;
            }
        }
    });
    record_vector(Kind::ttril, c);
}

void Core::tcvt(const Tile& to, const Tile& from, Where where) {
    where_ = where;
    std::byte* const out = vector_tile(Kind::tcvt, to, from);
    const std::byte* const in = vector_tile(Kind::tcvt, from, from);
    const bool widens = to.dtype == DType::float32;
    if (!widens && from.dtype != DType::float32) {
        fail(name_of(Kind::tcvt),
             describe(from) + " to " + describe(to) + ": converts from float32 or to float32");
    }
    execute(name_of(Kind::tcvt), Pipe::V, {reads(from), writes(to)}, [=] {
        for (std::size_t row = 0; row < to.valid_rows; ++row) {
            std::byte* const there = out + row * to.cols * bytes_of(to.dtype);
            const std::byte* const here = in + row * from.cols * bytes_of(from.dtype);
            if (widens) {
                widen_run(reinterpret_cast<float*>(there), here, from.dtype, to.valid_cols);
            } else {
                narrow_run(there, to.dtype, reinterpret_cast<const float*>(here), to.valid_cols);
            }
        }
    });
    record_vector(Kind::tcvt, from);
}

template <class Element>
void Core::reduce_rows(Kind kind, float first, const Element& element, const Tile& c,
                       const Tile& a) {
    float* const out = float_column(kind, c, a);
    const float* const in = float_tile(kind, a, a);
    execute(name_of(kind), Pipe::V, {reads(a), writes(c)}, [=] {
        // The order is fixed, and one that host vectors can use: each lane takes every 16th element.
        constexpr std::size_t kLanes = 16;
        for (std::size_t row = 0; row < a.valid_rows; ++row) {
            const float* const at = in + row * a.cols;
            float lanes[kLanes];
            for (float& lane : lanes) lane = first;
            std::size_t i = 0;
            for (; i + kLanes <= a.valid_cols; i += kLanes) {
                for (std::size_t j = 0; j < kLanes; ++j) lanes[j] = element(lanes[j], at[i + j]);
            }
            for (std::size_t j = 0; i + j < a.valid_cols; ++j) {
                lanes[j] = element(lanes[j], at[i + j]);
            }
            for (std::size_t j = 1; j < kLanes; ++j) lanes[0] = element(lanes[0], lanes[j]);
            out[row] = lanes[0];
        }
    });
    record_vector(kind, a);
}

void Core::trowmax(const Tile& c, const Tile& a, Where where) {
    where_ = where;
    reduce_rows(
        Kind::trowmax, -std::numeric_limits<float>::infinity(),
        [](float x, float y) { return x > y ? x : y; }, c, a);
}

void Core::trowsum(const Tile& c, const Tile& a, Where where) {
    where_ = where;
    reduce_rows(Kind::trowsum, 0, [](float x, float y) { return x + y; }, c, a);
}

template <class Element>
void Core::expand_rows(Kind kind, const Element& element, const Tile& c, const Tile& a,
                       const Tile& column) {
    float* const out = float_tile(kind, c, c);
    const float* const in = float_tile(kind, a, c);
    const float* const each = float_column(kind, column, c);
    execute(name_of(kind), Pipe::V, {reads(a), reads(column), writes(c)}, [=] {
        for (std::size_t row = 0; row < c.valid_rows; ++row) {
            const std::size_t start = row * c.cols;
            const float with = each[row];
            for (std::size_t i = start; i < start + c.valid_cols; ++i) {
                out[i] = element(in[i], with);
            }
        }
    });
    record_vector(kind, c);
}

void Core::trowexpandsub(const Tile& c, const Tile& a, const Tile& column, Where where) {
    where_ = where;
    expand_rows(Kind::trowexpandsub, [](float x, float y) { return x - y; }, c, a, column);
}

void Core::trowexpandmul(const Tile& c, const Tile& a, const Tile& column, Where where) {
    where_ = where;
    expand_rows(Kind::trowexpandmul, [](float x, float y) { return x * y; }, c, a, column);
}

void Core::trowexpanddiv(const Tile& c, const Tile& a, const Tile& column, Where where) {
    where_ = where;
    expand_rows(Kind::trowexpanddiv, [](float x, float y) { return x / y; }, c, a, column);
}

}  // namespace mkernel::ascend::sim
