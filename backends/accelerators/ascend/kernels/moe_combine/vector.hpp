// MoE combine, compute kernel (vector cores): weighted sums of the rows that came home.
//   1. Items of work: bands of a chunk's tokens, chunk by chunk; blocks take them in turns. Before
//      the first band of a chunk a block waits until every other rank's part of it is here.
//   2. A band, so many columns at a time as fit UB: for each slot, load its row of every token,
//      widen, multiply each row by its weight, add. Round the sum, store.
//   3. When all blocks are through, every rank is signalled that the inbox is free (release.hpp).
// Everything but the V-only scratch is double-buffered. Flags (event = half): MTE2→V rows and weights
// of a slot loaded, V→MTE2 their half free; V→MTE3 sum complete, MTE3→V its half stored and free.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::moe_combine {

template <class Core>
class Vector {
  public:
    Vector(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), words_(core, args.tables.base) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        const moe::Routing& r = g_.routing;
        own_ = words_.count(r.start(args_.rank));
        owned_ = words_.count(r.begin(args_.rank, r.tokens));
        homes_ = words_.count(r.homes());
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.set_flag(Pipe::V, Pipe::MTE2, half);
            core_.set_flag(Pipe::MTE3, Pipe::V, half);
        }
        std::uint32_t item = 0;
        for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
            bool here = false;
            for (std::uint32_t token = g_.token(chunk); token < g_.token(chunk + 1);
                 token += band_rows()) {
                if (item++ % core_.count() != core_.index()) continue;
                if (!here && !wait_chunk(chunk)) return false;
                here = true;
                band(token, part_of(g_.token(chunk + 1), token, band_rows()));
            }
        }
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.wait_flag(Pipe::V, Pipe::MTE2, half);
            core_.wait_flag(Pipe::MTE3, Pipe::V, half);
        }
        return g_.world == 1 || release(core_, args_, g_.world, g_.finished());
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

    static constexpr std::uint32_t kBufferBytes = 16 << 10;  // of rows in float32
    static constexpr std::uint32_t kMostColumns = 512;
    static constexpr std::uint32_t kMostRows = 256;

    // Returns the pitch of a tile's rows, so large that each starts at 32 bytes in every dtype.
    [[nodiscard]] std::uint32_t pitch() const {
        const std::uint32_t columns = g_.features < kMostColumns ? g_.features : kMostColumns;
        return divide_up(columns, 16) * 16;
    }
    [[nodiscard]] std::uint32_t band_rows() const {
        const std::uint32_t rows = kBufferBytes / (pitch() * sizeof(float));
        return rows < kMostRows ? rows : kMostRows;
    }

    bool wait_chunk(std::uint32_t chunk) {
        core_.annotate(chunk);
        return args_.compute_only || wait_arrived(core_, args_, chunk);
    }

    void band(std::uint32_t token, std::uint32_t rows) {
        for (std::uint32_t column = 0; column < g_.features; column += pitch()) {
            const std::uint32_t columns = part_of(g_.features, column, pitch());
            const Tile sum = buffer(0 + sum_half_, isa::DType::float32, rows, columns);
            const Tile wide = buffer(4, isa::DType::float32, rows, columns);
            core_.wait_flag(Pipe::MTE3, Pipe::V, sum_half_);
            for (std::uint32_t slot = 0; slot < g_.routing.top_k; ++slot) {
                const Tile raw = buffer(2 + row_half_, g_.dtype, rows, columns);
                const Tile weights = column_of_weights(rows);
                core_.wait_flag(Pipe::V, Pipe::MTE2, row_half_);
                load(raw, weights, token, slot, column);
                core_.set_flag(Pipe::MTE2, Pipe::V, row_half_);
                core_.wait_flag(Pipe::MTE2, Pipe::V, row_half_);
                const bool narrow = g_.dtype != isa::DType::float32;
                if (narrow) core_.tcvt(wide, raw);
                const Tile& product = slot == 0 ? sum : wide;
                core_.trowexpandmul(product, narrow ? wide : raw, weights);
                if (slot > 0) core_.tadd(sum, sum, wide);
                core_.set_flag(Pipe::V, Pipe::MTE2, row_half_);
                row_half_ ^= 1;
            }
            Tile rounded = sum;
            if (args_.out.dtype != isa::DType::float32) {
                rounded = buffer(5 + sum_half_, args_.out.dtype, rows, columns);
                core_.tcvt(rounded, sum);
            }
            core_.set_flag(Pipe::V, Pipe::MTE3, sum_half_);
            core_.wait_flag(Pipe::V, Pipe::MTE3, sum_half_);
            core_.tstore(args_.out.sub(token, column, rows, columns), rounded);
            core_.set_flag(Pipe::MTE3, Pipe::V, sum_half_);
            sum_half_ ^= 1;
        }
    }

    // Loads each token's row of one slot, and its weight.
    void load(const Tile& raw, const Tile& weights, std::uint32_t token, std::uint32_t slot,
              std::uint32_t column) {
        core_.tload(weights, args_.weights.sub(token, slot, raw.valid_rows, 1));
        Tile line = raw.with_valid(1, raw.valid_cols);
        line.rows = 1;
        for (std::uint32_t i = 0; i < raw.valid_rows; ++i) {
            const std::uint32_t place = (token + i) * g_.routing.top_k + slot;
            core_.tload(line, result(place).sub(0, column, 1, raw.valid_cols));
            line.offset += line.bytes();
        }
    }

    // Returns the row of an own place: among those that came home, or one of the own experts'; the last row
    // of y where it has none.
    [[nodiscard]] isa::GlobalView result(std::uint32_t place) const {
        const std::uint32_t number = words_.count(g_.routing.home(place));
        if (number >= homes_) return args_.y.sub(args_.y.rows - 1, 0, 1, g_.features);
        if (number - own_ < owned_) {  // false below own_, too: unsigned
            const std::uint32_t row = words_.count(g_.routing.rows(args_.rank, number - own_));
            return args_.y.sub(row, 0, 1, g_.features);
        }
        return args_.row(args_.inbox, number);
    }

    // Returns the `number`th buffer of UB.
    [[nodiscard]] Tile buffer(std::uint32_t number, isa::DType dtype, std::uint32_t rows,
                              std::uint32_t columns) const {
        return {.buffer = isa::Buffer::UB,
                .dtype = dtype,
                .offset = number * kBufferBytes,
                .rows = rows,
                .cols = pitch(),
                .valid_rows = rows,
                .valid_cols = columns};
    }
    [[nodiscard]] Tile column_of_weights(std::uint32_t rows) const {
        const auto half = static_cast<std::uint32_t>(row_half_ * kMostRows * sizeof(float));
        return {.buffer = isa::Buffer::UB,
                .dtype = isa::DType::float32,
                .offset = 7 * kBufferBytes + half,
                .rows = rows,
                .cols = 1,
                .valid_rows = rows,
                .valid_cols = 1};
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    moe::Words<Core> words_;
    std::uint32_t own_ = 0, owned_ = 0;  // the own rank's part of the order of `home`
    std::uint32_t homes_ = 0;            // places that have a row
    std::uint32_t sum_half_ = 0, row_half_ = 0;
};

MKERNEL_ASCEND_KERNEL(aiv, moe_combine, vector, Vector, Args)

}  // namespace mkernel::ascend::moe_combine
