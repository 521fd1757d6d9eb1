// MoE dispatch, vector part of the compute kernel: tables, then tokens to the rows of their experts.
//   1. All blocks build the routing tables together (tables.hpp).
//   2. Items of work: all chunks, in the order of Args::chunk. Blocks take them in turns. A chunk is
//      spread when it has arrived: each of its tokens is copied to its rows and the rows are noted
//      for the combine; then it signals the cube cores. Between the own chunks and those of others, the
//      blocks compute where results come home.
//   3. When all blocks are through, every rank is signalled that the inboxes are free (release.hpp).
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/moe/tables.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::moe {

template <class Core>
class Vector {
  public:
    Vector(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          words_(core, args.tables.base),
          buffers_(g_.dtype, g_.hidden) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        Tables<Core> tables(core_, args_);
        if (!tables.build()) return false;
        std::uint32_t item = core_.index();
        const auto spread_until = [&](std::uint32_t end) {
            for (; item < end; item += core_.count()) {
                if (!spread(args_.chunk(item))) return false;
            }
            return true;
        };
        if (!spread_until(g_.chunks())) return false;
        tables.come_home();
        if (!spread_until(g_.world * g_.chunks())) return false;
        return g_.world == 1 || release(core_, args_, g_.world, g_.finished());
    }

  private:
    bool spread(const Chunk& chunk) {
        const Routing& r = g_.routing;
        const auto [source, number] = chunk;
        core_.annotate(number);
        if (source != args_.rank && !args_.compute_only &&
            !core_.twait(args_.word(g_.arrived(source, number)), 1, source)) {
            return false;
        }
        for (std::uint32_t expert = 0; expert < r.experts; ++expert) {
            words_.set(g_.next(source, number, expert),
                       words_.count(g_.first(source, number, expert)));
        }
        const isa::GlobalView view = args_.ids(source);
        const Words<Core> ids(core_, view.base, static_cast<std::uint64_t>(view.row_stride));
        const std::uint32_t first = g_.token(number), here = words_.count(r.begin(source, first)),
                            places = words_.count(g_.here(source, number));
        // The token of the latest place, and its number in the slot.
        std::uint32_t token = first, at = first;
        for (std::uint32_t i = 0; i < places; ++i) {
            const std::uint32_t place = words_.count(g_.found(source, first * r.top_k + i));
            const std::uint32_t expert = static_cast<std::uint32_t>(ids.get(place)) % r.experts;
            if (i > 0 && place / r.top_k > token) ++at;
            for (; token < place / r.top_k; ++token)
                words_.set(r.begin(source, token + 1), here + i);
            const std::uint32_t row = words_.next(g_.next(source, number, expert));
            words_.set(r.rows(source, here + i), row);
            core_.tput(args_.rank, args_.grouped.sub(row, 0, 1, g_.hidden),
                       args_.token(source, token, at), buffers_.ping, buffers_.pong);
        }
        for (; token + 1 < g_.token(number + 1); ++token) {
            words_.set(r.begin(source, token + 1), here + places);
        }
        core_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.word(g_.spread(source, number)), 1);
        return true;
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Words<Core> words_;
    isa::RowBuffers buffers_;
};

MKERNEL_ASCEND_KERNEL(aiv, moe, vector, Vector, Args)

}  // namespace mkernel::ascend::moe
