// One output tile of a product on a cube core: GM → L1 → L0 → L0C → GM, everything double-buffered,
// L0C where it holds two output tiles. Between `open` and `close`, any number of tiles.
//   1. For each K tile, ascending: load A and B into one half of L1.
//   2. For each step_k of it: extract A and B into one half of L0A and L0B, multiply into L0C.
//   3. After the last K tile, store L0C to `out`, converting to its dtype.
// Flags (event = half of the buffer):
//   MTE2→MTE1 loaded, MTE1→MTE2 L1 half free; MTE1→M extracted, M→MTE1 L0 half free;
//   M→FIX output tile complete, FIX→M L0C free.
#pragma once

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend::gemm {

template <class Core>
class Product {
  public:
    // `dtype`: of A and B.
    Product(Core& core, const Tiling& tiling, isa::DType dtype)
        : core_(core),
          t_(tiling),
          dtype_(dtype),
          halves_(2 * output_bytes() <= isa::capacity_of(isa::Buffer::L0C) ? 2 : 1) {}

    void open() {
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, half);
            core_.set_flag(Pipe::M, Pipe::MTE1, half);
        }
        for (std::uint32_t half = 0; half < halves_; ++half) {
            core_.set_flag(Pipe::FIX, Pipe::M, half);
        }
    }

    void close() {
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, half);
            core_.wait_flag(Pipe::M, Pipe::MTE1, half);
        }
        for (std::uint32_t half = 0; half < halves_; ++half) {
            core_.wait_flag(Pipe::FIX, Pipe::M, half);
        }
    }

    // out = A @ B; `b`: [k, out.cols], rows or columns contiguous. `a(k_tile)`: the view of A's
    // tile [out.rows, depth], asked for right before it is loaded; with a null base (a wait was
    // aborted or timed out) `tile` returns false at once.
    template <class SourceOfA>
    bool tile(const isa::GlobalView& out, const isa::GlobalView& b, const SourceOfA& a) {
        const Tile sum{.buffer = isa::Buffer::L0C,
                       .dtype = isa::DType::float32,
                       .offset = out_half_ * output_bytes(),
                       .rows = t_.tile_m,
                       .cols = t_.tile_n,
                       .valid_rows = out.rows,
                       .valid_cols = out.cols};
        core_.wait_flag(Pipe::FIX, Pipe::M, out_half_);
        for (std::uint32_t k_tile = 0; k_tile < divide_up(b.rows, t_.tile_k); ++k_tile) {
            const isa::GlobalView source = a(k_tile);
            if (source.base == nullptr) return false;
            const std::uint32_t depth = source.cols;
            const Tile l1a = l1_a(out.rows, depth), l1b = l1_b(b, depth);
            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, l1_half_);
            core_.tload(l1a, source);
            core_.tload(l1b, b.sub(std::int64_t{k_tile} * t_.tile_k, 0, depth, b.cols));
            core_.set_flag(Pipe::MTE2, Pipe::MTE1, l1_half_);
            core_.wait_flag(Pipe::MTE2, Pipe::MTE1, l1_half_);
            for (std::uint32_t at = 0; at < depth; at += t_.step_k) {
                multiply_step(sum, l1a, l1b, at, k_tile == 0 && at == 0);
            }
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, l1_half_);
            l1_half_ ^= 1;
        }
        core_.set_flag(Pipe::M, Pipe::FIX, out_half_);
        core_.wait_flag(Pipe::M, Pipe::FIX, out_half_);
        core_.tstore(out, sum);
        core_.set_flag(Pipe::FIX, Pipe::M, out_half_);
        out_half_ = (out_half_ + 1) % halves_;
        return true;
    }

    // The same where all of A [out.rows, k] is at hand.
    void tile(const isa::GlobalView& out, const isa::GlobalView& b, const isa::GlobalView& a) {
        tile(out, b, [&](std::uint32_t k_tile) {
            const std::uint32_t from = k_tile * t_.tile_k;
            return a.sub(0, from, a.rows, part_of(a.cols, from, t_.tile_k));
        });
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

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

    // L1: A halves, then B halves.
    [[nodiscard]] Tile l1_a(std::uint32_t rows, std::uint32_t depth) const {
        const std::uint32_t bytes = t_.tile_m * t_.tile_k * isa::bytes_of(dtype_);
        return {.buffer = isa::Buffer::L1,
                .dtype = dtype_,
                .offset = l1_half_ * bytes,
                .rows = t_.tile_m,
                .cols = t_.tile_k,
                .valid_rows = rows,
                .valid_cols = depth};
    }
    [[nodiscard]] Tile l1_b(const isa::GlobalView& b, std::uint32_t depth) const {
        const std::uint32_t size = isa::bytes_of(dtype_);
        return {
            .buffer = isa::Buffer::L1,
            .dtype = dtype_,
            .layout = b.col_stride == 1 ? isa::Layout::row : isa::Layout::column,
            .offset = 2 * t_.tile_m * t_.tile_k * size + l1_half_ * t_.tile_k * t_.tile_n * size,
            .rows = t_.tile_k,
            .cols = t_.tile_n,
            .valid_rows = depth,
            .valid_cols = b.cols};
    }

    Core& core_;
    Tiling t_;
    isa::DType dtype_;
    std::uint32_t halves_;  // of L0C
    std::uint32_t l1_half_ = 0, l0_half_ = 0, out_half_ = 0;
};

}  // namespace mkernel::ascend::gemm
