// MoE dispatch+GEMM, cube part of the compute kernel: rows of each own expert @ its weights → out.
//   1. When the tables are there, every (expert, row tile, column tile) is an item of work; row
//      tiles start anew at each expert, and belong to the source whose rows they begin with. Round by
//      round each expert gives one row tile of each source, the own ones first: all sources' rows
//      come in at the same pace. Blocks take items in turns.
//   2. Before a row tile a block waits for the chunks that fill its rows, and for no other.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/gemm/product.hpp"
#include "backends/accelerators/ascend/kernels/moe/tables.hpp"

namespace mkernel::ascend::moe {

template <class Core>
class Cube {
  public:
    Cube(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          words_(core, args.tables.base),
          product_(core, g_.tiling(), g_.dtype) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        core_.annotate(kNoAnnotation);
        if (!Tables<Core>::wait_placed(core_, args_)) return false;
        product_.open();
        std::uint32_t number = 0;
        bool more = true;
        for (std::uint32_t round = 0; more; ++round) {
            more = false;
            for (std::uint32_t expert = 0; expert < g_.routing.experts; ++expert) {
                const std::uint32_t begin = words_.count(g_.routing.base(expert)),
                                    end = words_.count(g_.routing.base(expert + 1));
                for (std::uint32_t step = 0; step < g_.world; ++step) {
                    const std::uint32_t source = args_.order[step];
                    const std::uint32_t tile = first_tile(expert, source, begin) + round;
                    const std::uint32_t row = begin + tile * g_.tile_m;
                    const std::uint32_t tiles = source + 1 < g_.world
                                                    ? first_tile(expert, source + 1, begin)
                                                    : divide_up(end - begin, g_.tile_m);
                    if (tile >= tiles) continue;
                    more = true;
                    if (!row_tile(expert, row, part_of(end, row, g_.tile_m), number)) return false;
                    number += g_.n_tiles();
                }
            }
        }
        product_.close();
        return true;
    }

  private:
    // Returns the first row tile of an expert, whose rows start at `begin`, that begins with rows of `source`
    // or of a later source.
    [[nodiscard]] std::uint32_t first_tile(std::uint32_t expert, std::uint32_t source,
                                           std::uint32_t begin) const {
        return divide_up(words_.count(g_.first(source, 0, expert)) - begin, g_.tile_m);
    }

    // Computes those column tiles of a row tile that are this block's; `number`: the first one's among all
    // items.
    bool row_tile(std::uint32_t expert, std::uint32_t row, std::uint32_t rows,
                  std::uint32_t number) {
        bool filled = false;
        for (std::uint32_t n_tile = 0; n_tile < g_.n_tiles(); ++n_tile, ++number) {
            if (number % core_.count() != core_.index()) continue;
            if (!filled && !wait_filled(expert, row, rows)) return false;
            filled = true;
            const std::uint32_t column = n_tile * g_.tile_n;
            const std::uint32_t columns = part_of(g_.features, column, g_.tile_n);
            product_.tile(args_.out.sub(row, column, rows, columns),
                          args_.weights(expert).sub(0, column, g_.hidden, columns),
                          args_.grouped.sub(row, 0, rows, g_.hidden));
        }
        return true;
    }

    bool wait_filled(std::uint32_t expert, std::uint32_t row, std::uint32_t rows) {
        for (std::uint32_t source = 0; source < g_.world; ++source) {
            std::uint32_t begin = words_.count(g_.first(source, 0, expert));
            if (words_.count(g_.first(source, g_.chunks(), expert)) <= row) continue;
            for (std::uint32_t chunk = 0; chunk < g_.chunks() && begin < row + rows; ++chunk) {
                const std::uint32_t end = words_.count(g_.first(source, chunk + 1, expert));
                core_.annotate(chunk);
                if (begin < end && end > row &&
                    !core_.twait(args_.word(g_.spread(source, chunk)), 1, args_.rank)) {
                    return false;
                }
                begin = end;
            }
        }
        return true;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Words<Core> words_;
    gemm::Product<Core> product_;
};

MKERNEL_ASCEND_KERNEL(aic, moe, cube, Cube, Args)

}  // namespace mkernel::ascend::moe
