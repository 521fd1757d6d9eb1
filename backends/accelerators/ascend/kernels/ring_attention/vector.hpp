// Ring attention, compute kernel, vector part: the online softmax. Two vector cores share the rows
// of each tile of a cube core.
//
// Step n, once the cube core has raised scored for it:
//   1. Weights of tile n, in bands of rows, double-buffered: scores, scaled and masked → running
//      maximum, e^(s - maximum) → ring; the factor e^(old - new maximum) is kept for the tile's
//      part, the running sum takes the weights. Both are put by when other ranks' keys come later.
//   2. Part of tile n - kAhead: result · factor + part. After the last tile of keys: result / sum,
//      rounded once → out; maximum + log sum → lse. After the last one of own keys it is put by.
//   3. Fence, and raise weighed. All of UB is free again.
// Scores and sums are float32; weights are rounded to the input's dtype for the product alone.
// Flags: MTE2→V scores loaded (half), part and what was put by loaded (2); V→MTE3 weights complete (half),
//   results (2), a result that is put by (3); MTE3→MTE2 weights stored, and so the half free (half), or
//   all of them, and so the part's place (2).
#pragma once

#include <limits>

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/steps.hpp"

namespace mkernel::ascend::ring_attention {

template <class Core>
class Vector {
  public:
    Vector(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          cube_(core.index() / kVectorsPerCube),
          half_(core.index() % kVectorsPerCube) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        Steps ahead(args_, cube_), behind = ahead;
        const std::uint32_t tiles = ahead.size(), steps = tiles > 0 ? tiles + kAhead : 0;
        for (std::uint32_t n = 0; n < steps; ++n) {
            annotate(behind.step());
            if (!core_.twait(args_.word(g_.scored(cube_)), n + 1, args_.rank)) return false;
            if (n < tiles) {
                annotate(ahead.step());
                weigh(ahead.step(), n);
                ahead.advance();
            }
            if (n >= kAhead) {
                annotate(behind.step());
                accumulate(behind.step(), n - kAhead, n < tiles);
                behind.advance();
            }
            if (n + 1 < steps) core_.fence();
            if (n < tiles) {
                core_.tnotify(args_.rank, args_.pad, args_.word(g_.weighed(core_.index())), 1);
            }
        }
        return true;
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

    // The rows of a tile that are a core's.
    struct Rows {
        std::uint32_t first, count;
    };
    static constexpr std::uint32_t kMaxRows = kMaxQueries / kVectorsPerCube;
    // The bytes of UB: of a band of scores, of weights (float32: in the scores' place), of a core's results,
    // of a column. A part takes the scores' place, results that are rounded the weights'.
    static constexpr std::uint32_t kScores = 32 << 10, kWeights = kScores / 2;
    static constexpr std::uint32_t kResult =
        kBlocks * kBlockResults / kVectorsPerCube * sizeof(float);
    static constexpr std::uint32_t kColumn = kMaxRows * sizeof(float);
    static constexpr std::uint32_t kPartAt = 0, kWeightsAt = 2 * kScores, kRoundedAt = kWeightsAt,
                                   kResultAt = kWeightsAt + 2 * kWeights,
                                   kColumnsAt = kResultAt + kResult;
    static_assert(kResult <= 2 * kScores && kResult / 2 <= 2 * kWeights);

    // Columns of UB. Those of an item or tile are kept until its part has come, kAhead steps later.
    [[nodiscard]] Tile top(const Step& step) const { return column(step.item % kRing); }
    [[nodiscard]] Tile sum(const Step& step) const { return column(kRing + step.item % kRing); }
    [[nodiscard]] static Tile factor(std::uint32_t number) {
        return column(2 * kRing + number % kRing);
    }
    [[nodiscard]] static Tile fresh() { return column(3 * kRing); }

    void annotate(const Step& step) { core_.annotate(g_.chunk_at(step.piece, step.at)); }

    [[nodiscard]] Rows rows_of(const Step& step) const {
        const std::uint32_t first = divide_up(step.queries, kVectorsPerCube);
        return half_ == 0 ? Rows{0, first} : Rows{first, step.queries - first};
    }

    void weigh(const Step& step, std::uint32_t number) {
        const auto [first, count] = rows_of(step);
        if (count == 0) return;
        const isa::GlobalView from = args_.scores(cube_, number, step.queries, step.keys),
                              to = args_.weights(cube_, number, step.queries, step.keys);
        if (step.first) {
            core_.tfill(in_rows(top(step), 0, count), -std::numeric_limits<float>::infinity());
            core_.tfill(in_rows(sum(step), 0, count), 0);
        }
        if (step.resumes) {  // the first scores, which V waits for, come behind these
            core_.tload(in_rows(top(step), 0, count),
                        args_.paused_column(0, row_of(step, first), count));
            core_.tload(in_rows(sum(step), 0, count),
                        args_.paused_column(1, row_of(step, first), count));
        }
        const std::uint32_t most = band_rows(step.keys);
        for (std::uint32_t row = 0, half = 0; row < count; row += most, half ^= 1) {
            const std::uint32_t rows = part_of(count, row, most);
            const Tile scores = band_tile(half * kScores, isa::DType::float32, rows, step.keys);
            if (row >= 2 * most) core_.wait_flag(Pipe::MTE3, Pipe::MTE2, half);
            core_.tload(scores, from.sub(first + row, 0, rows, step.keys));
            core_.set_flag(Pipe::MTE2, Pipe::V, half);
            core_.wait_flag(Pipe::MTE2, Pipe::V, half);
            soften(step, number, scores, first + row, row, rows);
            Tile weights = scores;
            if (g_.dtype != isa::DType::float32) {
                weights = band_tile(kWeightsAt + half * kWeights, g_.dtype, rows, step.keys);
                core_.tcvt(weights, scores);
            }
            core_.set_flag(Pipe::V, Pipe::MTE3, half);
            core_.wait_flag(Pipe::V, Pipe::MTE3, half);
            core_.tstore(to.sub(first + row, 0, rows, step.keys), weights);
            if (row + 2 * most < count) core_.set_flag(Pipe::MTE3, Pipe::MTE2, half);
        }
        if (step.pauses) {
            // V is through with both: the weights of the last band come after them.
            core_.tstore(args_.paused_column(0, row_of(step, first), count),
                         in_rows(top(step), 0, count));
            core_.tstore(args_.paused_column(1, row_of(step, first), count),
                         in_rows(sum(step), 0, count));
        }
    }

    // Returns the row among all queries of the tile's `first`th.
    [[nodiscard]] std::uint64_t row_of(const Step& step, std::uint32_t first) const {
        return std::uint64_t{step.plane} * g_.rows + step.row + first;
    }

    // Makes weights of scores. `query`: the band's first row in the tile, `row`: among this core's.
    void soften(const Step& step, std::uint32_t number, const Tile& s, std::uint32_t query,
                std::uint32_t row, std::uint32_t rows) {
        const Tile old = in_rows(top(step), row, rows), total = in_rows(sum(step), row, rows),
                   scaled = in_rows(factor(number), row, rows), now = in_rows(fresh(), row, rows);
        core_.tmuls(s, s, args_.scale);
        const std::int32_t diagonal = step.diagonal + static_cast<std::int32_t>(query);
        if (step.masked && diagonal < static_cast<std::int32_t>(step.keys) - 1) {
            core_.ttril(s, s, diagonal, -std::numeric_limits<float>::infinity());
        }
        core_.trowmax(now, s);
        core_.tmax(now, now, old);
        core_.tsub(scaled, old, now);
        core_.texp(scaled, scaled);
        core_.tmax(old, old, now);
        core_.trowexpandsub(s, s, now);
        core_.texp(s, s);
        core_.trowsum(now, s);
        core_.tmul(total, total, scaled);
        core_.tadd(total, total, now);
    }

    // `weighed`: this step has weighed a tile already.
    void accumulate(const Step& step, std::uint32_t number, bool weighed) {
        const auto [first, count] = rows_of(step);
        if (count == 0) return;
        if (weighed) {  // its scores and weights are through
            core_.set_flag(Pipe::MTE3, Pipe::MTE2, 2);
            core_.wait_flag(Pipe::MTE3, Pipe::MTE2, 2);
        }
        const Tile result = result_tile(kResultAt, isa::DType::float32, count),
                   part = result_tile(kPartAt, isa::DType::float32, count);
        core_.tload(part,
                    args_.part(cube_, number, step.queries).sub(first, 0, count, g_.head_dim));
        if (step.resumes) core_.tload(result, args_.paused(row_of(step, first), count));
        core_.set_flag(Pipe::MTE2, Pipe::V, 2);
        core_.wait_flag(Pipe::MTE2, Pipe::V, 2);
        if (step.first) {
            core_.tfill(result, 0);
        } else {
            core_.trowexpandmul(result, result, in_rows(factor(number), 0, count));
        }
        core_.tadd(result, result, part);
        if (step.last) finish(step, result, first, count);
        if (step.pauses) {
            core_.set_flag(Pipe::V, Pipe::MTE3, 3);
            core_.wait_flag(Pipe::V, Pipe::MTE3, 3);
            core_.tstore(args_.paused(row_of(step, first), count), result);
        }
    }

    void finish(const Step& step, const Tile& result, std::uint32_t first, std::uint32_t count) {
        const Tile total = in_rows(sum(step), 0, count);
        core_.trowexpanddiv(result, result, total);
        Tile rounded = result;
        if (g_.dtype != isa::DType::float32) {
            rounded = result_tile(kRoundedAt, g_.dtype, count);
            core_.tcvt(rounded, result);
        }
        core_.tlog(total, total);
        core_.tadd(total, total, in_rows(top(step), 0, count));
        core_.set_flag(Pipe::V, Pipe::MTE3, 2);
        core_.wait_flag(Pipe::V, Pipe::MTE3, 2);
        const auto row = static_cast<std::int64_t>(row_of(step, first));
        core_.tstore(args_.out.sub(row, 0, count, g_.head_dim), rounded);
        core_.tstore(args_.lse.sub(row, 0, count, 1), total);
    }

    // Returns the rows of a band, the more the fewer keys they have, so that few bands wait for memory: rows
    // begin at multiples of 32 bytes, and so do columns of bands.
    [[nodiscard]] static std::uint32_t band_pitch(std::uint32_t keys) {
        return divide_up(keys, 32) * 32;
    }
    [[nodiscard]] static std::uint32_t band_rows(std::uint32_t keys) {
        const auto rows = static_cast<std::uint32_t>(kScores / sizeof(float)) / band_pitch(keys);
        return rows < kMaxRows / 2 ? rows / 8 * 8 : kMaxRows / 2;
    }
    [[nodiscard]] static Tile band_tile(std::uint32_t offset, isa::DType dtype, std::uint32_t rows,
                                        std::uint32_t keys) {
        return {.buffer = isa::Buffer::UB,
                .dtype = dtype,
                .offset = offset,
                .rows = band_rows(keys),
                .cols = band_pitch(keys),
                .valid_rows = rows,
                .valid_cols = keys};
    }
    [[nodiscard]] Tile result_tile(std::uint32_t offset, isa::DType dtype,
                                   std::uint32_t rows) const {
        return {.buffer = isa::Buffer::UB,
                .dtype = dtype,
                .offset = offset,
                .rows = divide_up(g_.tile_queries(), kVectorsPerCube),
                .cols = g_.head_dim,
                .valid_rows = rows,
                .valid_cols = g_.head_dim};
    }
    [[nodiscard]] static Tile column(std::uint32_t number) {
        return {.buffer = isa::Buffer::UB,
                .dtype = isa::DType::float32,
                .offset = kColumnsAt + number * kColumn,
                .rows = kMaxRows,
                .cols = 1,
                .valid_rows = kMaxRows,
                .valid_cols = 1};
    }
    [[nodiscard]] static Tile in_rows(Tile column, std::uint32_t row, std::uint32_t rows) {
        column.offset += row * sizeof(float);
        column.rows = column.valid_rows = rows;
        return column;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    std::uint32_t cube_, half_;
};

MKERNEL_ASCEND_KERNEL(aiv, ring_attention, vector, Vector, Args)

}  // namespace mkernel::ascend::ring_attention
