// One output tile of a product on a cube core: GM → L1 → L0 → L0C → GM. L0 is double-buffered, L0C
// where it holds two output tiles; L1 has up to four stages, which hide the latency of memory.
// Between `open` and `close`, any number of tiles, all of the same K.
//   1. For each K tile, ascending: load A and B into one stage of L1.
//   2. For each step_k of it: extract A and B into one half of L0A and L0B, multiply into L0C.
//   3. After the last K tile, store L0C to `out`, converting to its dtype. Where K has segments, do so after
//      the last K tile of each, with a result of its own for each.
// An output may be several row blocks of tile_m (`blocks`; two at most, as L0C has halves): they share
// each load of B.
// Tiles of the same rows of A, one after another, load the first K tiles of A once (`same_rows`): they
// stay in what L1 has left, since all cores share the way to memory. Tiles of the same columns of B do
// so with B (`same_columns`). A kernel keeps one of the two.
// Flags (event = stage or half of the buffer):
//   MTE2→MTE1 loaded, MTE1→MTE2 L1 stage free; MTE1→M extracted, M→MTE1 L0 half free;
//   M→FIX output tile complete, FIX→M L0C free.
// A kept K tile of A is read after the load of B of the same step or of an earlier one. It is overwritten
// after the wait for a stage that was free later than it, or, where that is too recent, after a flag of its
// own: MTE1→MTE2 (kFlush).
#pragma once

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::gemm {

// Equal parts of K, whose products are separate results of one shape: each lies `stride` bytes after the
// one before. No K tile is of two segments.
struct Segments {
    std::uint32_t number = 1;
    std::uint64_t stride = 0;
};

template <class Core>
class Product {
  public:
    // `dtype`: that of A and B; `blocks`: the most row blocks of an output; `eighths`: the eighths of L1 that
    // stages may take, so that the rest may keep A or B.
    Product(Core& core, const Tiling& tiling, isa::DType dtype, std::uint32_t blocks = 1,
            std::uint32_t eighths = 5)
        : core_(core),
          t_(tiling),
          dtype_(dtype),
          blocks_(blocks),
          stages_(stages_of(blocks * a_bytes() + b_bytes(), eighths)),
          halves_(2 * output_bytes() <= isa::capacity_of(isa::Buffer::L0C) ? 2 : 1) {}

    void open() {
        for (std::uint32_t stage = 0; stage < stages_; ++stage) {
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, stage);
        }
        for (std::uint32_t half = 0; half < 2; ++half) core_.set_flag(Pipe::M, Pipe::MTE1, half);
        for (std::uint32_t half = 0; half < halves_; ++half) {
            core_.set_flag(Pipe::FIX, Pipe::M, half);
        }
    }

    void close() {
        for (std::uint32_t stage = 0; stage < stages_; ++stage) {
            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, stage);
        }
        for (std::uint32_t half = 0; half < 2; ++half) core_.wait_flag(Pipe::M, Pipe::MTE1, half);
        for (std::uint32_t half = 0; half < halves_; ++half) {
            core_.wait_flag(Pipe::FIX, Pipe::M, half);
        }
    }

    // Computes out = A @ B; `b`: [k, out.cols], rows or columns contiguous. `a(k_tile)` returns the view of
    // A's tile [out.rows, depth], and is called right before it is loaded; with a null base (a wait was
    // aborted or timed out) `tile` returns false at once.
    template <class SourceOfA>
    bool tile(const isa::GlobalView& out, const isa::GlobalView& b, const SourceOfA& a) {
        streams_ = true;
        if (loaded_ > room()) {  // in the stages' place
            flush();
            loaded_ = 0;
        }
        return tile(out, b, {}, 0, 0, a, [](std::uint32_t) {});
    }

    // Does the same where all of A [out.rows, k] is at hand.
    void tile(const isa::GlobalView& out, const isa::GlobalView& b, const isa::GlobalView& a) {
        tile(out, b, k_tiles_of(a, {}));
    }

    // Does the same where A lies in memory that nobody writes while the kernel runs; `out` is the first
    // segment's. `issued(k_tile)` is called after each K tile's instructions, while the pipes are at work on
    // them.
    template <class Issued>
    void same_rows(const isa::GlobalView& out, const isa::GlobalView& b, const isa::GlobalView& a,
                   const Issued& issued, const Segments& segments = {}) {
        const std::uint32_t kept =
            keeps(segments.number * divide_up(b.rows / segments.number, t_.tile_k));
        if (a.base != kept_ || a.rows != kept_lines_) loaded_ = 0;
        kept_ = a.base;
        kept_lines_ = a.rows;
        tile(out, b, segments, kept, loaded_, k_tiles_of(a, segments), issued);
        loaded_ = kept;
    }

    // Does the same where B lies in memory that nobody writes while the kernel runs; `a`, and the return
    // value, as in `tile`.
    template <class SourceOfA>
    bool same_columns(const isa::GlobalView& out, const isa::GlobalView& b, const SourceOfA& a) {
        columns_ = true;
        const std::uint32_t k_tiles = divide_up(b.rows, t_.tile_k),
                            kept = k_tiles < room() ? k_tiles : room();
        if (b.base != kept_ || b.cols != kept_lines_) loaded_ = 0;
        kept_ = b.base;
        kept_lines_ = b.cols;
        if (!tile(out, b, {}, kept, loaded_, a, [](std::uint32_t) {})) return false;
        loaded_ = kept;
        return true;
    }

    // Fences pipe FIX: everything that has led to the tiles so far is done.
    void fence() {
        core_.fence(isa::Pipe::FIX);
        flushed_ = stored_ > flushed_ ? stored_ : flushed_;
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

    static constexpr std::uint32_t kMostStages = 4, kMostKept = 128;
    static constexpr std::uint32_t kFlush = kMostStages;  // event

    // Returns where a K tile begins in `k` of so many segments.
    [[nodiscard]] std::uint32_t start_of(std::uint32_t k_tile, std::uint32_t k,
                                         std::uint32_t segments) const {
        const std::uint32_t depth = k / segments, each = divide_up(depth, t_.tile_k);
        return k_tile / each * depth + k_tile % each * t_.tile_k;
    }
    [[nodiscard]] auto k_tiles_of(const isa::GlobalView& a, const Segments& segments) const {
        return [this, a, number = segments.number](std::uint32_t k_tile) {
            const std::uint32_t depth = a.cols / number, from = start_of(k_tile, a.cols, number);
            return a.sub(0, from, a.rows, part_of(depth, from % depth, t_.tile_k));
        };
    }

    // `kept`: K tiles of A (or B), from the first on, that have a place of their own in L1, of which
    // `loaded` hold this one already.
    template <class SourceOfA, class Issued>
    bool tile(isa::GlobalView out, const isa::GlobalView& b, const Segments& segments,
              std::uint32_t kept, std::uint32_t loaded, const SourceOfA& a, const Issued& issued) {
        const std::uint32_t each = divide_up(b.rows / segments.number, t_.tile_k),  // K tiles
            last = (out.rows - 1) / t_.tile_m;                                      // row block
        for (std::uint32_t k_tile = 0; k_tile < segments.number * each; ++k_tile) {
            const bool first = k_tile % each == 0, final = (k_tile + 1) % each == 0;
            if (first) core_.wait_flag(Pipe::FIX, Pipe::M, out_half_);
            const isa::GlobalView source = a(k_tile);
            if (source.base == nullptr) return false;
            const bool keeps = k_tile < kept, here = k_tile < loaded;
            const Tile l1b = l1_b(keeps && columns_, k_tile, b, source.cols);
            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, stage_);
            if (keeps && !here) wait_read(k_tile);
            if (columns_ || !here) {
                each_block(out, [&](std::uint32_t block, std::uint32_t row, std::uint32_t rows) {
                    core_.tload(l1_a(keeps && !columns_, k_tile, block, rows, source.cols),
                                source.sub(row, 0, rows, source.cols));
                });
            }
            if (!columns_ || !here) {
                core_.tload(
                    l1b, b.sub(start_of(k_tile, b.rows, segments.number), 0, source.cols, b.cols));
            }
            core_.set_flag(Pipe::MTE2, Pipe::MTE1, stage_);
            core_.wait_flag(Pipe::MTE2, Pipe::MTE1, stage_);
            each_block(out, [&](std::uint32_t block, std::uint32_t, std::uint32_t rows) {
                const std::uint32_t half = (out_half_ + block) % halves_;
                const Tile sum = l0_c(half, rows, out.cols),
                           l1a = l1_a(keeps && !columns_, k_tile, block, rows, source.cols);
                if (first && block > 0) core_.wait_flag(Pipe::FIX, Pipe::M, half);
                for (std::uint32_t at = 0; at < source.cols; at += t_.step_k) {
                    multiply_step(sum, l1a, l1b, at, first && at == 0);
                }
                // Stored while the next block is at work; the last one's store comes below.
                if (final && block < last) store(out, block, half);
            });
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, stage_);
            stage_ = (stage_ + 1) % stages_;
            ++steps_;
            if (keeps) read_[k_tile] = steps_;
            issued(k_tile);
            if (!final) continue;
            store(out, last, (out_half_ + last) % halves_);
            stored_ = steps_;
            out_half_ = (out_half_ + last + 1) % halves_;
            out.base += segments.stride;
        }
        return true;
    }

    void store(const isa::GlobalView& out, std::uint32_t block, std::uint32_t half) {
        const std::uint32_t row = block * t_.tile_m, rows = part_of(out.rows, row, t_.tile_m);
        core_.set_flag(Pipe::M, Pipe::FIX, half);
        core_.wait_flag(Pipe::M, Pipe::FIX, half);
        core_.tstore(out.sub(row, 0, rows, out.cols), l0_c(half, rows, out.cols));
        core_.set_flag(Pipe::FIX, Pipe::M, half);
    }

    // Calls `work(block, row, rows)` for each of an output's row blocks.
    template <class Work>
    void each_block(const isa::GlobalView& out, const Work& work) const {
        for (std::uint32_t row = 0; row < out.rows; row += t_.tile_m) {
            work(row / t_.tile_m, row, part_of(out.rows, row, t_.tile_m));
        }
    }

    void multiply_step(const Tile& sum, const Tile& a, const Tile& b, std::uint32_t at,
                       bool first) {
        const std::uint32_t depth = part_of(a.valid_cols, at, t_.step_k);
        const std::uint32_t size = isa::bytes_of(dtype_);
        const Tile l0a{.buffer = isa::Buffer::L0A,
                       .dtype = dtype_,
                       .offset = l0_half_ * t_.tile_m * t_.step_k * size,
                       .rows = t_.tile_m,
                       .cols = t_.step_k,
                       .valid_rows = a.valid_rows,
                       .valid_cols = depth};
        const Tile l0b{.buffer = isa::Buffer::L0B,
                       .dtype = dtype_,
                       .offset = l0_half_ * t_.step_k * t_.tile_n * size,
                       .rows = t_.step_k,
                       .cols = t_.tile_n,
                       .valid_rows = depth,
                       .valid_cols = b.valid_cols};
        core_.wait_flag(Pipe::M, Pipe::MTE1, l0_half_);
        core_.textract(l0a, a, 0, at);
        core_.textract(l0b, b, at, 0);
        core_.set_flag(Pipe::MTE1, Pipe::M, l0_half_);
        core_.wait_flag(Pipe::MTE1, Pipe::M, l0_half_);
        if (first) {
            core_.tmatmul(sum, l0a, l0b);
        } else {
            core_.tmatmul_acc(sum, l0a, l0b);
        }
        core_.set_flag(Pipe::M, Pipe::MTE1, l0_half_);
        l0_half_ ^= 1;
    }

    [[nodiscard]] std::uint32_t output_bytes() const {
        return t_.tile_m * t_.tile_n * static_cast<std::uint32_t>(sizeof(float));
    }

    [[nodiscard]] std::uint32_t a_bytes() const {
        return t_.tile_m * t_.tile_k * isa::bytes_of(dtype_);
    }
    [[nodiscard]] std::uint32_t b_bytes() const {
        return t_.tile_k * t_.tile_n * isa::bytes_of(dtype_);
    }

    // Returns as many stages as these eighths of L1 hold; at least two.
    static constexpr std::uint32_t stages_of(std::uint32_t each, std::uint32_t eighths) {
        const std::uint32_t found = isa::capacity_of(isa::Buffer::L1) / 8 * eighths / each;
        return found < 2 ? 2 : found < kMostStages ? found : kMostStages;
    }
    // Returns the bytes of a K tile of the kept matrix: A of all row blocks, or B.
    [[nodiscard]] std::uint32_t kept_bytes() const {
        return columns_ ? b_bytes() : blocks_ * a_bytes();
    }
    // Returns the number of such K tiles that fit beside all stages in L1.
    [[nodiscard]] std::uint32_t room() const {
        const std::uint32_t used = stages_ * (blocks_ * a_bytes() + b_bytes());
        const std::uint32_t fit = (isa::capacity_of(isa::Buffer::L1) - used) / kept_bytes();
        return fit < kMostKept - kMostStages ? fit : kMostKept - kMostStages;
    }
    // Returns the number of K tiles of A that L1 keeps: all, if need be in the stages' place, or those that
    // fit beside these.
    [[nodiscard]] std::uint32_t keeps(std::uint32_t k_tiles) const {
        const std::uint32_t most = room() + (streams_ ? 0 : stages_);
        return k_tiles <= most ? k_tiles : room();
    }
    // Waits until MTE1 has read a kept tile for the last time.
    void wait_read(std::uint32_t k_tile) {
        if (read_[k_tile] + stages_ <= steps_ + 1 || read_[k_tile] <= flushed_) return;
        flush();
    }
    void flush() {
        core_.set_flag(Pipe::MTE1, Pipe::MTE2, kFlush);
        core_.wait_flag(Pipe::MTE1, Pipe::MTE2, kFlush);
        flushed_ = steps_;
    }

    [[nodiscard]] Tile l0_c(std::uint32_t half, std::uint32_t rows, std::uint32_t cols) const {
        return {.buffer = isa::Buffer::L0C,
                .dtype = isa::DType::float32,
                .offset = half * output_bytes(),
                .rows = t_.tile_m,
                .cols = t_.tile_n,
                .valid_rows = rows,
                .valid_cols = cols};
    }
    // L1 has stages of B, then stages of A; from its end on lie the kept tiles of A or B.
    [[nodiscard]] std::uint32_t kept_at(std::uint32_t k_tile) const {
        return isa::capacity_of(isa::Buffer::L1) - (k_tile + 1) * kept_bytes();
    }
    [[nodiscard]] Tile l1_a(bool kept, std::uint32_t k_tile, std::uint32_t block,
                            std::uint32_t rows, std::uint32_t depth) const {
        const std::uint32_t stage = stages_ * b_bytes() + stage_ * blocks_ * a_bytes();
        return {.buffer = isa::Buffer::L1,
                .dtype = dtype_,
                .offset = (kept ? kept_at(k_tile) : stage) + block * a_bytes(),
                .rows = t_.tile_m,
                .cols = t_.tile_k,
                .valid_rows = rows,
                .valid_cols = depth};
    }
    [[nodiscard]] Tile l1_b(bool kept, std::uint32_t k_tile, const isa::GlobalView& b,
                            std::uint32_t depth) const {
        return {.buffer = isa::Buffer::L1,
                .dtype = dtype_,
                .layout = b.col_stride == 1 ? isa::Layout::row : isa::Layout::column,
                .offset = kept ? kept_at(k_tile) : stage_ * b_bytes(),
                .rows = t_.tile_k,
                .cols = t_.tile_n,
                .valid_rows = depth,
                .valid_cols = b.cols};
    }

    Core& core_;
    Tiling t_;
    isa::DType dtype_;
    std::uint32_t blocks_;
    std::uint32_t stages_;  // of L1
    std::uint32_t halves_;  // of L0C
    std::uint32_t stage_ = 0, l0_half_ = 0, out_half_ = 0;
    const std::byte* kept_ = nullptr;  // the A, or B, whose first `loaded_` K tiles L1 holds
    std::uint32_t kept_lines_ = 0, loaded_ = 0;
    bool columns_ = false;  // B is kept
    bool streams_ = false;  // some tiles keep nothing
    // Counts of steps (K tiles): those so far; those of tiles whose store is issued; those that are through
    // for certain; and those up to the latest reader of a kept tile.
    std::uint64_t steps_ = 0, stored_ = 0, flushed_ = 0, read_[kMostKept] = {};
};

}  // namespace mkernel::ascend::gemm
