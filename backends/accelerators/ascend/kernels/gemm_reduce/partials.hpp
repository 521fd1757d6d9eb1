// Partial results on vector cores: sending a chunk of them to its owner, and summing the own tiles.
//   send   Waits until this rank has computed the chunk; then, same node: TPUT each tile from the
//          outbox through UB into the owner's inbox, fence, TNOTIFY; other node: one command to the
//          NIC proxy puts the chunk's range and raises the same signal.
//   sum    Waits until every rank's part of the chunk is here; then adds the ranks' partials of one
//          tile in rank order, in float32, rounds once to the output's dtype and stores. The order
//          is the same on every rank and in every call: results are deterministic.
// Invariant sums (args.hpp) are added by the tree instead, from left to right: what was added so far is a
// stack of nodes, each of more segments than the next one, and two of equally many become one at once. A
// rank that has several leaves adds these up into the outbox before it sends.
// A sum works on strips of rows that fit UB: two sums, and as many partials on their way as UB holds,
// two in float32, four of 16 bits; a tree, on shorter ones, four or eight. Flags (event = the partial's
// buffer, or the half of the sums):
//   MTE2→V partial loaded, V→MTE2 its buffer free; V→MTE3 sum complete, MTE3→MTE2 its half stored and free.
#pragma once

#include <bit>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::gemm_reduce {

template <class Core>
class Partials {
  public:
    // The bytes of a strip in float32. UB holds two sums, two rounded ones and partials: two of float32, or
    // four of 16 bits and one of them in float32. Strips of a tree are shorter: UB holds two roots, two rounded
    // ones, partials of four float32 strips, a rounded node, and a node of each level below the root.
    static constexpr std::uint32_t kStripBytes = 32 << 10;

    Partials(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), released_(core, args, g_.world) {}

    // All functions below return false if a wait was aborted or timed out.

    bool send(std::uint32_t owner, std::uint32_t chunk) {
        core_.annotate(chunk);
        if (!wait_computed(owner, chunk)) return false;
        if (!released_.wait(owner)) return false;
        const std::uint64_t from = g_.outbox(owner), to = g_.inbox(owner, args_.rank);
        if (g_.adds_leaves() && !add_leaves(owner, chunk)) return false;
        if (args_.same_node(owner)) {
            for (std::uint32_t tile = g_.chunk_begin(owner, chunk);
                 tile < g_.chunk_end(owner, chunk); ++tile) {
                const isa::GlobalView computed = args_.partial(args_.outbox + from, owner, tile);
                const isa::RowBuffers rows(computed.dtype, g_.tile_n);
                core_.tput(owner, args_.partial(args_.peers[owner].inbox + to, owner, tile),
                           computed, rows.ping, rows.pong);
            }
            fence();
        } else if (storing_) {  // what nobody has been told of: an earlier item's
            fence();
        }
        const Range range = g_.chunk_range(owner, chunk);
        return announce(core_, args_, owner, g_.arrived(args_.rank, chunk),
                        {from + range.offset, to + range.offset, range.bytes});
    }

    // Sums the own `tile`, of the own `chunk`, into `out` and into those of the `copies` that have a base.
    // With any of these it is all visible on return: other ranks are notified next.
    bool sum(std::uint32_t chunk, std::uint32_t tile, const isa::GlobalView& out,
             const isa::GlobalView (&copies)[2]) {
        core_.annotate(chunk);
        if (!wait_computed(args_.rank, chunk) || !wait_arrived(core_, args_, chunk)) return false;
        add(args_.rank, tile, out, copies);
        if (copies[0].base != nullptr || copies[1].base != nullptr) fence();
        return true;
    }

    // Gets a finished tile from a rank's memory, through the whole of UB.
    void get(std::uint32_t peer, const isa::GlobalView& to, const isa::GlobalView& from) {
        const isa::RowBuffers rows(from.dtype, g_.tile_n);
        core_.tget(peer, to, from, rows.ping, rows.pong);
        storing_ = true;
    }

  private:
    using Pipe = isa::Pipe;
    using Tile = isa::Tile;

    [[nodiscard]] bool narrow() const { return isa::bytes_of(g_.partial_dtype) == 2; }
    [[nodiscard]] bool tree() const { return g_.segments > 0; }
    // Returns the number of partials under way.
    [[nodiscard]] std::uint32_t buffered() const { return (narrow() ? 4 : 2) * (tree() ? 2 : 1); }

    [[nodiscard]] std::uint32_t strip_bytes() const {
        const std::uint32_t levels = std::bit_width(g_.segments);
        return tree() ? isa::capacity_of(isa::Buffer::UB) / (7 + levels) / 512 * 512 : kStripBytes;
    }
    [[nodiscard]] std::uint32_t strip_rows() const {
        const std::uint32_t rows = strip_bytes() / sizeof(float) / g_.tile_n;
        return rows < g_.tile_m ? rows : g_.tile_m;
    }

    void fence() {
        core_.fence();
        storing_ = false;
    }

    bool wait_computed(std::uint32_t owner, std::uint32_t chunk) {
        return core_.twait(args_.word(g_.computed(owner, chunk)), g_.chunk_tiles(owner, chunk),
                           args_.rank);
    }

    // Adds up the own leaves of all tiles of an owner's chunk into the outbox.
    bool add_leaves(std::uint32_t owner, std::uint32_t chunk) {
        if (!released_.wait_outbox()) return false;
        for (std::uint32_t tile = g_.chunk_begin(owner, chunk); tile < g_.chunk_end(owner, chunk);
             ++tile) {
            add(owner, tile, args_.partial(args_.outbox + g_.outbox(owner), owner, tile), {});
        }
        return true;
    }

    // Adds up what this rank has of a tile: of an own one everything, of another owner's the own leaves.
    void add(std::uint32_t owner, std::uint32_t tile, const isa::GlobalView& out,
             const isa::GlobalView (&copies)[2]) {
        if (storing_) {  // from the buffers that are filled next
            core_.set_flag(Pipe::MTE3, Pipe::MTE2, 0);
            core_.wait_flag(Pipe::MTE3, Pipe::MTE2, 0);
        }
        const std::uint32_t strips = divide_up(out.rows, strip_rows());
        std::uint32_t terms = 0;
        each_term(owner, [&](std::byte*, std::uint32_t) { ++terms; });
        part_ = 0;
        parts_ = strips * (tree() || narrow() ? terms : terms - 1);
        for (std::uint32_t i = 0; i < strips; ++i) {
            strip(owner, tile, i, out, copies);
            if (i + 2 < strips) core_.set_flag(Pipe::MTE3, Pipe::MTE2, i % 2);
        }
        storing_ = true;
    }

    // Calls `work(slot, segments)` for each partial that `add` adds: its slot, and of how many segments it is.
    template <class Work>
    void each_term(std::uint32_t owner, const Work& work) const {
        const std::uint32_t leaves = g_.leaves();
        for (std::uint32_t source = 0; source < g_.world; ++source) {
            if (source == args_.rank && g_.adds_leaves()) {
                for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
                    work(args_.scratch + leaf * g_.leaf_stride() + g_.outbox(owner), 1);
                }
            } else if (owner == args_.rank) {
                work(slot_of(source), leaves);
            }
        }
    }

    void strip(std::uint32_t owner, std::uint32_t tile, std::uint32_t number,
               const isa::GlobalView& out, const isa::GlobalView (&copies)[2]) {
        const std::uint32_t half = number % 2, row = number * strip_rows(),
                            rows = part_of(out.rows, row, strip_rows());
        const auto buffer = [&](isa::DType dtype, std::uint32_t offset) {
            return Tile{.buffer = isa::Buffer::UB,
                        .dtype = dtype,
                        .offset = offset,
                        .rows = strip_rows(),
                        .cols = g_.tile_n,
                        .valid_rows = rows,
                        .valid_cols = out.cols};
        };
        // Places, in strips: sums from 0 on, rounded ones at 2, partials from 3 on; then a partial in float32,
        // or a tree's rounded node and its other nodes.
        const std::uint32_t bytes = strip_bytes();
        const Tile sum = buffer(isa::DType::float32, half * bytes),
                   wide = buffer(isa::DType::float32, 5 * bytes),
                   node = buffer(g_.partial_dtype, 7 * bytes);
        const auto node_at = [&](std::uint32_t depth) {
            return depth == 0 ? sum : buffer(isa::DType::float32, (7 + depth) * bytes);
        };
        std::uint32_t depth = 0, sizes[std::bit_width(kMostSegments)];  // of the stack of nodes
        bool first = true;
        if (number >= 2) core_.wait_flag(Pipe::MTE3, Pipe::MTE2, half);
        each_term(owner, [&](std::byte* slot, std::uint32_t segments) {
            const isa::GlobalView whole = args_.partial(slot, owner, tile);
            const isa::GlobalView from = whole.sub(row, 0, rows, whole.cols);
            const bool begins = first;
            first = false;
            if (begins && !narrow() && !tree()) {
                core_.tload(sum, from);  // V waits for the next load, which comes behind this one
                return;
            }
            const std::uint32_t place = part_ % buffered();
            const Tile part =
                buffer(g_.partial_dtype, 3 * bytes + place * bytes / (narrow() ? 2 : 1));
            if (part_ >= buffered()) core_.wait_flag(Pipe::V, Pipe::MTE2, place);
            core_.tload(part, from);
            core_.set_flag(Pipe::MTE2, Pipe::V, place);
            core_.wait_flag(Pipe::MTE2, Pipe::V, place);
            if (tree()) {
                Tile top = node_at(depth);
                if (narrow()) {
                    core_.tcvt(top, part);
                } else if (depth > 0 && sizes[depth - 1] == segments) {
                    top = part;
                } else {
                    core_.tmuls(top, part, 1);
                }
                for (; depth > 0 && sizes[depth - 1] == segments; segments *= 2) {
                    const Tile left = node_at(--depth);
                    core_.tadd(left, left, top);
                    if (narrow()) {
                        core_.tcvt(node, left);
                        core_.tcvt(left, node);
                    }
                    top = left;
                }
                sizes[depth++] = segments;
            } else {
                if (narrow()) core_.tcvt(begins ? sum : wide, part);
                if (!begins) core_.tadd(sum, sum, narrow() ? wide : part);
            }
            // The last ones are free once the sum is stored.
            if (part_ + buffered() < parts_) core_.set_flag(Pipe::V, Pipe::MTE2, place);
            ++part_;
        });
        Tile rounded = sum;
        if (out.dtype != isa::DType::float32) {
            rounded = buffer(out.dtype, 2 * bytes + half * bytes / 2);
            core_.tcvt(rounded, sum);
        }
        core_.set_flag(Pipe::V, Pipe::MTE3, half);
        core_.wait_flag(Pipe::V, Pipe::MTE3, half);
        core_.tstore(out.sub(row, 0, rows, out.cols), rounded);
        for (const isa::GlobalView& copy : copies) {
            if (copy.base != nullptr) core_.tstore(copy.sub(row, 0, rows, out.cols), rounded);
        }
    }

    [[nodiscard]] std::byte* slot_of(std::uint32_t source) const {
        return source == args_.rank ? args_.outbox + g_.outbox(source)
                                    : args_.inbox + g_.inbox(args_.rank, source);
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Released<Core> released_;
    bool storing_ = false;  // MTE3, maybe: it was given work since the latest fence
    std::uint32_t part_ = 0,
                  parts_ = 0;  // of a sum: the next partial's number, and how many there are
};

}  // namespace mkernel::ascend::gemm_reduce
