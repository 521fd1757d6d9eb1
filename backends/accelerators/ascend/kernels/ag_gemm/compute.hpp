// AllGather+GEMM, compute kernel (cube cores).
//
// Data flow: C [world * m_local, n] = concat(A of all ranks) @ B, in output tiles of tile_m x
// tile_n.
//   1. All output tiles of the rank are numbered in the order of consumption.hpp (the own rows
//      first); block i computes tiles i, i + blocks, ...: all blocks work on early data first, and
//      every output tile is a unit of parallelism.
//   2. For each K tile, ascending: wait for its chunk (own rows: never), then load A (own rows:
//      from the user's tensor; others: from their staging slot) and B into one half of L1.
//   3. For each step_k of it: extract A and B into one half of L0A and L0B, multiply into L0C.
//   4. After the last K tile, store L0C as the output tile, converting to C's dtype.
//   5. When a block has no tile left it counts itself finished; block 0 waits for all blocks, then
//      tells every rank that this one's slots of the epoch are free (directly, or through the NIC).
// Flags (event = half of the buffer; L0C has one half):
//   MTE2→MTE1 loaded, MTE1→MTE2 L1 half free; MTE1→M extracted, M→MTE1 L0 half free;
//   M→FIX output tile complete, FIX→M L0C free.
#pragma once

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/consumption.hpp"
#include "backends/nics/fifo_device.hpp"

namespace mkernel::ascend::ag_gemm {

template <class Core>
class Compute {
  public:
    Compute(Core& core, const Args& args) : core_(core), args_(args), g_(args.geometry) {}

    // False if a wait was aborted or timed out.
    bool run() {
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, half);
            core_.set_flag(Pipe::M, Pipe::MTE1, half);
        }
        core_.set_flag(Pipe::FIX, Pipe::M, 0);
        const Consumption tiles(args_);
        for (std::uint32_t i = core_.index(); i < tiles.size(); i += core_.count()) {
            if (!output_tile(tiles[i])) return false;
        }
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, half);
            core_.wait_flag(Pipe::M, Pipe::MTE1, half);
        }
        core_.wait_flag(Pipe::FIX, Pipe::M, 0);
        return g_.world == 1 || release();
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;
    static constexpr std::uint32_t kNone = 0xffffffff;

    bool output_tile(const OutputTile& tile) {
        const auto [source, row_group, n_tile] = tile;
        const std::uint32_t n_left = g_.n - n_tile * g_.tile_n;
        const std::uint32_t width = n_left < g_.tile_n ? n_left : g_.tile_n;
        const std::uint32_t rows = g_.rows_of(row_group);
        const Tile sum{.buffer = isa::Buffer::L0C,
                       .dtype = isa::DType::float32,
                       .rows = g_.tile_m,
                       .cols = g_.tile_n,
                       .valid_rows = rows,
                       .valid_cols = width};
        core_.wait_flag(Pipe::FIX, Pipe::M, 0);
        for (std::uint32_t k_tile = 0; k_tile < g_.k_tiles(); ++k_tile) {
            const std::uint32_t chunk = g_.chunk_of(row_group * g_.k_tiles() + k_tile);
            core_.annotate(source == args_.rank ? kNone : chunk);
            if (source != args_.rank && !wait_chunk(source, chunk)) return false;
            const std::uint32_t depth = g_.depth_of(k_tile);
            const Tile a = l1_a(rows, depth), b = l1_b(depth, width);

            core_.wait_flag(Pipe::MTE1, Pipe::MTE2, l1_half_);
            core_.tload(a, source == args_.rank
                               ? args_.own_tile(row_group, k_tile)
                               : args_.staged(args_.workspace, source, row_group, k_tile));
            core_.tload(b, args_.b.sub(std::int64_t{k_tile} * g_.tile_k,
                                       std::int64_t{n_tile} * g_.tile_n, depth, width));
            core_.set_flag(Pipe::MTE2, Pipe::MTE1, l1_half_);
            core_.wait_flag(Pipe::MTE2, Pipe::MTE1, l1_half_);
            for (std::uint32_t at = 0; at < depth; at += g_.step_k) {
                multiply_step(sum, a, b, at, k_tile == 0 && at == 0);
            }
            core_.set_flag(Pipe::MTE1, Pipe::MTE2, l1_half_);
            l1_half_ ^= 1;
        }
        core_.set_flag(Pipe::M, Pipe::FIX, 0);
        core_.wait_flag(Pipe::M, Pipe::FIX, 0);
        const std::int64_t row =
            std::int64_t{source} * g_.m_local + std::int64_t{row_group} * g_.tile_m;
        core_.tstore(args_.out.sub(row, std::int64_t{n_tile} * g_.tile_n, rows, width), sum);
        core_.set_flag(Pipe::FIX, Pipe::M, 0);
        return true;
    }

    void multiply_step(const Tile& sum, const Tile& a, const Tile& b, std::uint32_t at,
                       bool first) {
        const std::uint32_t left = a.valid_cols - at;
        const std::uint32_t depth = left < g_.step_k ? left : g_.step_k;
        const std::uint32_t size = isa::bytes_of(g_.dtype);
        const Tile l0a{.buffer = isa::Buffer::L0A,
                       .dtype = g_.dtype,
                       .offset = l0_half_ * g_.tile_m * g_.step_k * size,
                       .rows = g_.tile_m,
                       .cols = g_.step_k,
                       .valid_rows = a.valid_rows,
                       .valid_cols = depth};
        const Tile l0b{.buffer = isa::Buffer::L0B,
                       .dtype = g_.dtype,
                       .offset = l0_half_ * g_.step_k * g_.tile_n * size,
                       .rows = g_.step_k,
                       .cols = g_.tile_n,
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

    // L1: A halves, then B halves.
    [[nodiscard]] Tile l1_a(std::uint32_t rows, std::uint32_t depth) const {
        const std::uint32_t bytes = g_.tile_m * g_.tile_k * isa::bytes_of(g_.dtype);
        return {.buffer = isa::Buffer::L1,
                .dtype = g_.dtype,
                .offset = l1_half_ * bytes,
                .rows = g_.tile_m,
                .cols = g_.tile_k,
                .valid_rows = rows,
                .valid_cols = depth};
    }
    [[nodiscard]] Tile l1_b(std::uint32_t depth, std::uint32_t width) const {
        const std::uint32_t size = isa::bytes_of(g_.dtype);
        return {
            .buffer = isa::Buffer::L1,
            .dtype = g_.dtype,
            .layout = args_.b.col_stride == 1 ? isa::Layout::row : isa::Layout::column,
            .offset = 2 * g_.tile_m * g_.tile_k * size + l1_half_ * g_.tile_k * g_.tile_n * size,
            .rows = g_.tile_k,
            .cols = g_.tile_n,
            .valid_rows = depth,
            .valid_cols = width};
    }

    // Once all chunks of a same-node rank are in, its summary spares the other waits.
    bool wait_chunk(std::uint32_t source, std::uint32_t chunk) {
        if (args_.ignore_chunks || (complete_ >> source & 1) != 0) return true;
        if (args_.same_node(source) &&
            core_.ttest(args_.signal_base + g_.summary(args_.parity(), source),
                        args_.uses() * g_.chunks())) {
            complete_ |= std::uint64_t{1} << source;
            return true;
        }
        if (source == waited_source_ && chunk == waited_chunk_) return true;
        if (!core_.twait(args_.signal_base + g_.flag(args_.parity(), source, chunk), args_.uses(),
                         source)) {
            return false;
        }
        waited_source_ = source;
        waited_chunk_ = chunk;
        return true;
    }

    bool release() {
        core_.annotate(kNone);
        core_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.signal_base + g_.finished(), 1);
        if (core_.index() != 0) return true;
        if (!core_.twait(args_.signal_base + g_.finished(), args_.epoch * core_.count(),
                         args_.rank)) {
            return false;
        }
        const std::uint32_t signal = args_.signal_base + g_.released(args_.rank);
        for (std::uint32_t step = 1; step < g_.world; ++step) {
            const std::uint32_t peer = (args_.rank + step) % g_.world;
            if (args_.same_node(peer)) {
                core_.tnotify(peer, args_.peers[peer].pad, signal, 1);
            } else if (!core_.nic_put(
                           {.peer = peer, .region = args_.region, .signal = signal, .value = 1})) {
                return false;
            }
        }
        return true;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    std::uint32_t l1_half_ = 0, l0_half_ = 0;
    std::uint64_t complete_ = 0;  // bit per rank: its summary says that every chunk is here
    std::uint32_t waited_source_ = kNone, waited_chunk_ = kNone;
};

}  // namespace mkernel::ascend::ag_gemm
