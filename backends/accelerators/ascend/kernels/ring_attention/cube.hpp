// Ring attention, compute kernel, cube part: the two products of every tile (gemm/product.hpp).
//
// Step n of a cube core:
//   1. Scores of tile n: wait for its chunks (own keys: never); queries · keysᵀ → ring. The queries
//      stay in L1.
//   2. Part of tile n - kAhead: wait until both vector cores have weighed it; weights · values →
//      ring.
//   3. Once the next step's first products are issued: a fence of pipe FIX alone, and raise scored.
// When all cores are through, signal every rank that this one's slots are free (release.hpp). A place of the
// ring is free when it is used again: its contents were taken before the weights that step 2 of an earlier
// step has waited for.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/gemm/product.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/steps.hpp"

namespace mkernel::ascend::ring_attention {

template <class Core>
class Cube {
  public:
    Cube(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          product_(core, g_.tiling(), g_.dtype, kBlocks, kStageEighths),
          cube_(core.index()) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        Steps ahead(args_, cube_), behind = ahead;
        const std::uint32_t tiles = ahead.size();
        product_.open();
        for (std::uint32_t n = 0; tiles > 0 && n < tiles + kAhead; ++n) {
            if (n < tiles) {
                if (!score(ahead.step(), n)) return false;
                ahead.advance();
            }
            if (n >= kAhead) {
                if (!wait_weighed(behind.step(), n - kAhead + 1)) return false;
                weigh(behind.step(), n - kAhead);
                behind.advance();
            }
            tell();  // where this step has no products
            stored_ = true;
        }
        product_.close();
        tell();
        return g_.world == 1 || release(core_, args_, g_.world, g_.finished());
    }

  private:
    // Queries, which are all that L1 keeps, take a quarter of it at most.
    static constexpr std::uint32_t kStageEighths = 6;

    bool score(const Step& step, std::uint32_t number) {
        if (!wait_chunks(step)) return false;
        const isa::GlobalView keys = source(step, false);
        const isa::GlobalView transposed{keys.base, keys.dtype,      keys.cols,
                                         keys.rows, keys.col_stride, keys.row_stride};
        const isa::GlobalView queries = args_.q.sub(std::int64_t{step.plane} * g_.rows + step.row,
                                                    0, step.queries, g_.head_dim);
        const isa::GlobalView out = args_.scores(cube_, number, step.queries, step.keys);
        each_column(out, [&](std::uint32_t column, std::uint32_t columns) {
            product_.same_rows(out.sub(0, column, out.rows, columns),
                               transposed.sub(0, column, transposed.rows, columns), queries,
                               [&](std::uint32_t) { tell(); });
        });
        return true;
    }

    void weigh(const Step& step, std::uint32_t number) {
        const isa::GlobalView out = args_.part(cube_, number, step.queries),
                              weights = args_.weights(cube_, number, step.queries, step.keys),
                              values = source(step, true);
        tell();
        each_column(out, [&](std::uint32_t column, std::uint32_t columns) {
            product_.tile(out.sub(0, column, out.rows, columns),
                          values.sub(0, column, values.rows, columns), weights);
        });
    }

    // Calls `multiply(column, columns)` for each of a product's tiles.
    template <class Multiply>
    void each_column(const isa::GlobalView& out, const Multiply& multiply) {
        const std::uint32_t most = g_.tiling().tile_n;
        for (std::uint32_t column = 0; column < out.cols; column += most) {
            multiply(column, part_of(out.cols, column, most));
        }
    }

    // Signals that the previous step is in the ring.
    void tell() {
        if (!stored_) return;
        stored_ = false;
        product_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.word(g_.scored(cube_)), 1);
    }

    [[nodiscard]] isa::GlobalView source(const Step& step, bool values) const {
        const std::uint32_t batch = step.plane / g_.heads, head = step.plane % g_.heads;
        const std::uint32_t plane = batch * g_.kv_heads + head / (g_.heads / g_.kv_heads);
        return step.source == args_.rank
                   ? args_.own_keys(step.piece, values, plane, step.at, step.keys)
                   : args_.keys(args_.inbox + g_.slot_offset(args_.rank, step.source), step.piece,
                                values, plane, step.at, step.keys);
    }

    bool wait_weighed(const Step& step, std::uint32_t tiles) {
        core_.annotate(g_.chunk_at(step.piece, step.at));
        for (std::uint32_t half = 0; half < kVectorsPerCube; ++half) {
            const std::uint32_t vector = cube_ * kVectorsPerCube + half;
            if (!core_.twait(args_.word(g_.weighed(vector)), tiles, args_.rank)) return false;
        }
        return true;
    }

    // Chunks of a source are waited for in order, each once.
    bool wait_chunks(const Step& step) {
        const std::uint32_t last = g_.chunk_at(step.piece, step.at + step.keys - 1);
        core_.annotate(last);
        if (args_.compute_only || step.source == args_.rank) return true;
        for (std::uint32_t& chunk = here_[step.source]; chunk <= last; ++chunk) {
            core_.annotate(chunk);
            tell();  // the vector cores go on meanwhile
            if (!core_.twait(args_.word(g_.arrived(step.source, chunk)), 1, step.source)) {
                return false;
            }
        }
        return true;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    gemm::Product<Core> product_;
    std::uint32_t cube_;
    bool stored_ = false;                 // a step, which the vector cores have not been told of
    std::uint32_t here_[kMaxWorld] = {};  // chunks of each rank that are known to be here
};

MKERNEL_ASCEND_KERNEL(aic, ring_attention, cube, Cube, Args)

}  // namespace mkernel::ascend::ring_attention
