// AllGather+GEMM, compute kernel (cube cores).
//
// Data flow: C [world * m_local, n] = concat(A of all ranks) @ B, in output tiles of tile_m x
// tile_n.
//   1. All output tiles of the rank are numbered in the order of consumption.hpp (the own rows
//      first); block i computes tiles i, i + blocks, ...: all blocks work on early data first, and
//      every output tile is a unit of parallelism.
//      Where the columns of tiles divide the blocks, each block stays with its columns of B, of which
//      L1 keeps what it can.
//   2. For each K tile, ascending: wait for its chunk (own rows: never), then load A (own rows:
//      from the user's tensor; others: from their staging slot) and multiply (gemm/product.hpp).
//   3. After the last K tile, store the output tile, converting to C's dtype.
//   4. When all blocks are through, signal every rank that this one's slots are free (release.hpp).
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"
#include "backends/accelerators/ascend/kernels/consumption.hpp"
#include "backends/accelerators/ascend/kernels/gemm/product.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::ag_gemm {

template <class Core>
class Compute {
  public:
    Compute(Core& core, const Args& args)
        : core_(core), args_(args), g_(args.geometry), product_(core, g_.tiling(), g_.dtype) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        product_.open();
        const Consumption tiles(args_, g_.world, g_.row_groups(), g_.n_tiles());
        for (std::uint32_t i = core_.index(); i < tiles.size(); i += core_.count()) {
            if (!output_tile(tiles[i])) return false;
        }
        product_.close();
        return g_.world == 1 || release(core_, args_, g_.world, g_.finished());
    }

  private:
    static constexpr std::uint32_t kNone = kNoAnnotation;

    bool output_tile(const Consumption::Place& tile) {
        const auto [source, row_group, n_tile] = tile;
        const std::int64_t row =
            std::int64_t{source} * g_.m_local + std::int64_t{row_group} * g_.tile_m;
        const std::uint32_t column = n_tile * g_.tile_n;
        const std::uint32_t columns = part_of(g_.n, column, g_.tile_n);
        const isa::GlobalView out = args_.out.sub(row, column, g_.rows_of(row_group), columns);
        return product_.same_columns(
            out, args_.b.sub(0, column, g_.k, columns),
            [&](std::uint32_t k_tile) -> isa::GlobalView {
                const std::uint32_t chunk = g_.chunk_of(row_group * g_.k_tiles() + k_tile);
                core_.annotate(source == args_.rank ? kNone : chunk);
                if (source == args_.rank) return args_.own_tile(row_group, k_tile);
                if (!wait_chunk(source, chunk)) return {};
                return args_.staged(args_.inbox + g_.slot_offset(args_.rank, source), row_group,
                                    k_tile);
            });
    }

    bool wait_chunk(std::uint32_t source, std::uint32_t chunk) {
        if (args_.compute_only) return true;
        if (source == waited_source_ && chunk == waited_chunk_) return true;
        if (!core_.twait(args_.word(g_.arrived(source, chunk)), 1, source)) return false;
        waited_source_ = source;
        waited_chunk_ = chunk;
        return true;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    gemm::Product<Core> product_;
    std::uint32_t waited_source_ = kNone, waited_chunk_ = kNone;
};

MKERNEL_ASCEND_KERNEL(aic, ag_gemm, compute, Compute, Args)

}  // namespace mkernel::ascend::ag_gemm
