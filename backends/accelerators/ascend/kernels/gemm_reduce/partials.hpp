// Partial results on vector cores: sending a chunk of them to its owner, and summing the own tiles.
//   send   Waits until this rank has computed the chunk; then, same node: TPUT each tile from the
//          outbox through UB into the owner's inbox, fence, TNOTIFY; other node: one command to the
//          NIC proxy puts the chunk's range and raises the same signal.
//   sum    Waits until every rank's part of the chunk is here; then adds the ranks' partials of one
//          tile in rank order, in float32, rounds once to the output's dtype and stores. The order
//          is the same on every rank and in every call: results are deterministic.
// A sum works on bands of rows that fit UB, everything double-buffered. Flags (event = half):
//   MTE2→V partial loaded (0, 1: the first, into the sum; 2, 3: others), V→MTE2 others' half free;
//   V→MTE3 sum complete, MTE3→MTE2 sum's half stored and free.
#pragma once

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::gemm_reduce {

template <class Core>
class Partials {
  public:
    // Bytes of a band in float32; UB holds two sums, two partials and two rounded sums.
    static constexpr std::uint32_t kBandBytes = 32 << 10;

    Partials(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), released_(core, args, g_.world) {}

    // All below: false if a wait was aborted or timed out.

    bool send(std::uint32_t owner, std::uint32_t chunk) {
        core_.annotate(chunk);
        if (!wait_computed(owner, chunk)) return false;
        if (!released_.wait(owner)) return false;
        const std::uint64_t from = g_.outbox(owner), to = g_.inbox(owner, args_.rank);
        if (args_.same_node(owner)) {
            for (std::uint32_t tile = g_.chunk_begin(owner, chunk);
                 tile < g_.chunk_end(owner, chunk); ++tile) {
                copy(owner, args_.partial(args_.peers[owner].inbox + to, owner, tile),
                     args_.partial(args_.outbox + from, owner, tile));
            }
            core_.fence();
        }
        const Range range = g_.chunk_range(owner, chunk);
        return announce(core_, args_, owner, g_.arrived(args_.rank, chunk),
                        {from + range.offset, to + range.offset, range.bytes});
    }

    // The own `tile`, of the own `chunk`, to `out` and, where it has a base, also to `copy_of_out`.
    bool sum(std::uint32_t chunk, std::uint32_t tile, const isa::GlobalView& out,
             const isa::GlobalView& copy_of_out = {}) {
        core_.annotate(chunk);
        if (!wait_computed(args_.rank, chunk) || !wait_arrived(core_, args_, chunk)) return false;
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.set_flag(Pipe::V, Pipe::MTE2, half);
            core_.set_flag(Pipe::MTE3, Pipe::MTE2, half);
        }
        const std::uint32_t step = band_rows();
        for (std::uint32_t row = 0; row < out.rows; row += step) {
            band(tile, row, part_of(out.rows, row, step), out, copy_of_out);
        }
        for (std::uint32_t half = 0; half < 2; ++half) {
            core_.wait_flag(Pipe::V, Pipe::MTE2, half);
            core_.wait_flag(Pipe::MTE3, Pipe::MTE2, half);
        }
        return true;
    }

    // Copies a tile, here or to a same-node rank, through the whole of UB: what was issued before
    // must be complete.
    void copy(std::uint32_t peer, const isa::GlobalView& to, const isa::GlobalView& from) {
        const isa::RowBuffers rows(from.dtype, g_.tile_n);
        core_.tput(peer, to, from, rows.ping, rows.pong);
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

    [[nodiscard]] std::uint32_t band_rows() const {
        const std::uint32_t rows = kBandBytes / sizeof(float) / g_.tile_n;
        return rows < g_.tile_m ? rows : g_.tile_m;
    }

    bool wait_computed(std::uint32_t owner, std::uint32_t chunk) {
        return core_.twait(args_.word(g_.computed(owner, chunk)), g_.chunk_tiles(owner, chunk),
                           args_.rank);
    }

    void band(std::uint32_t tile, std::uint32_t row, std::uint32_t rows, const isa::GlobalView& out,
              const isa::GlobalView& copy_of_out) {
        const Tile sum = buffer(0 + sum_half_, isa::DType::float32, rows, out.cols);
        core_.wait_flag(Pipe::MTE3, Pipe::MTE2, sum_half_);
        for (std::uint32_t source = 0; source < g_.world; ++source) {
            const isa::GlobalView whole = args_.partial(slot_of(source), args_.rank, tile);
            const isa::GlobalView from = whole.sub(row, 0, rows, whole.cols);
            if (source == 0) {
                core_.tload(sum, from);
                core_.set_flag(Pipe::MTE2, Pipe::V, sum_half_);
                core_.wait_flag(Pipe::MTE2, Pipe::V, sum_half_);
                continue;
            }
            const Tile part = buffer(2 + part_half_, isa::DType::float32, rows, out.cols);
            core_.wait_flag(Pipe::V, Pipe::MTE2, part_half_);
            core_.tload(part, from);
            core_.set_flag(Pipe::MTE2, Pipe::V, 2 + part_half_);
            core_.wait_flag(Pipe::MTE2, Pipe::V, 2 + part_half_);
            core_.tadd(sum, sum, part);
            core_.set_flag(Pipe::V, Pipe::MTE2, part_half_);
            part_half_ ^= 1;
        }
        Tile rounded = sum;
        if (out.dtype != isa::DType::float32) {
            rounded = buffer(4 + sum_half_, out.dtype, rows, out.cols);
            core_.tcvt(rounded, sum);
        }
        core_.set_flag(Pipe::V, Pipe::MTE3, sum_half_);
        core_.wait_flag(Pipe::V, Pipe::MTE3, sum_half_);
        core_.tstore(out.sub(row, 0, rows, out.cols), rounded);
        if (copy_of_out.base != nullptr) {
            core_.tstore(copy_of_out.sub(row, 0, rows, out.cols), rounded);
        }
        core_.set_flag(Pipe::MTE3, Pipe::MTE2, sum_half_);
        sum_half_ ^= 1;
    }

    // The `number`th buffer of UB.
    [[nodiscard]] Tile buffer(std::uint32_t number, isa::DType dtype, std::uint32_t rows,
                              std::uint32_t columns) const {
        return {.buffer = isa::Buffer::UB,
                .dtype = dtype,
                .offset = number * kBandBytes,
                .rows = band_rows(),
                .cols = g_.tile_n,
                .valid_rows = rows,
                .valid_cols = columns};
    }

    [[nodiscard]] std::byte* slot_of(std::uint32_t source) const {
        return source == args_.rank ? args_.outbox + g_.outbox(source)
                                    : args_.inbox + g_.inbox(args_.rank, source);
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Released<Core> released_;
    std::uint32_t sum_half_ = 0, part_half_ = 0;
};

}  // namespace mkernel::ascend::gemm_reduce
