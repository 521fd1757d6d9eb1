// MoE dispatch, vector part of the compute kernel: routing tables (routing.hpp, args.hpp) by scalar
// instructions, one source rank a block.
//   1. Each source: go through its ids once; count the rows that each own expert gets of each chunk,
//      and in all; find where chunks begin. Beside that, from the own ids, where results come home.
//   2. When all sources are counted, each: rows before its own, by expert and then source; from them
//      the first row of each chunk.
#pragma once

#include "backends/accelerators/ascend/kernels/moe/args.hpp"

namespace mkernel::ascend::moe {

template <class Core>
class Tables {
  public:
    Tables(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          r_(args.geometry.routing),
          words_(core, args.tables.base) {}

    // Of all blocks together. False if a wait was aborted or timed out.
    bool build() {
        core_.annotate(kNoAnnotation);
        for (std::uint32_t source = core_.index(); source < g_.world; source += core_.count()) {
            if (!count(source)) return false;
        }
        if (g_.world % core_.count() == core_.index()) come_home();
        for (std::uint32_t source = core_.index(); source < g_.world; source += core_.count()) {
            if (!wait_all(g_.counted())) return false;
            place(source);
        }
        return wait_placed(core_, args_);
    }

    // Until the rows of every source are known.
    static bool wait_placed(Core& core, const Args& args) {
        const Geometry& g = args.geometry;
        return core.twait(args.signal_base + g.placed(), args.epoch * g.world, args.rank);
    }

  private:
    [[nodiscard]] Words<Core> ids(std::uint32_t source) const {
        const isa::GlobalView view = args_.ids(source);
        return {core_, view.base, static_cast<std::uint64_t>(view.row_stride)};
    }

    bool wait_all(std::uint32_t signal) {
        return core_.twait(args_.signal_base + signal, args_.epoch * g_.world, args_.rank);
    }

    void raise(std::uint32_t signal) {
        core_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.signal_base + signal, 1);
    }

    bool count(std::uint32_t source) {
        if (source != args_.rank && !args_.compute_only &&
            !core_.twait(args_.signal_base + g_.ids(args_.parity(), source), args_.uses(),
                         source)) {
            return false;
        }
        for (std::uint32_t expert = 0; expert < r_.experts; ++expert) {
            words_.set(g_.total(source, expert), 0);
            for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
                words_.set(g_.first(source, chunk, expert), 0);
            }
        }
        const Words<Core> given = ids(source);
        std::uint32_t tokens = 0, rows = 0, lower = 0;
        for (std::uint32_t token = 0; token < r_.tokens; ++token) {
            words_.set(r_.begin(source, token), rows);
            const std::uint32_t chunk = tokens / g_.rows_per_chunk, before = rows;
            for (std::uint32_t slot = 0; slot < r_.top_k; ++slot) {
                const std::int32_t id = given.get(std::uint64_t{token} * r_.top_k + slot);
                const std::uint32_t owner = r_.owner(id);
                lower += owner < args_.rank ? 1 : 0;
                if (owner != args_.rank) continue;
                const std::uint32_t expert = static_cast<std::uint32_t>(id) % r_.experts;
                words_.next(g_.first(source, chunk, expert));
                words_.next(g_.total(source, expert));
                ++rows;
            }
            if (rows == before) continue;
            if (tokens % g_.rows_per_chunk == 0) words_.set(g_.token(source, chunk), token);
            ++tokens;
        }
        words_.set(r_.begin(source, r_.tokens), rows);
        words_.set(r_.start(source), lower);
        for (std::uint32_t chunk = divide_up(tokens, g_.rows_per_chunk); chunk <= g_.chunks();
             ++chunk) {
            words_.set(g_.token(source, chunk), r_.tokens);
        }
        raise(g_.counted());
        return true;
    }

    void place(std::uint32_t source) {
        std::uint32_t row = 0;
        for (std::uint32_t expert = 0; expert < r_.experts; ++expert) {
            if (source == 0) words_.set(r_.base(expert), row);
            std::uint32_t at = 0;
            for (std::uint32_t each = 0; each < g_.world; ++each) {
                if (each == source) at = row;
                row += words_.count(g_.total(each, expert));
            }
            for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
                const std::uint32_t rows = words_.count(g_.first(source, chunk, expert));
                words_.set(g_.first(source, chunk, expert), at);
                at += rows;
            }
            words_.set(g_.first(source, g_.chunks(), expert), at);
        }
        if (source == 0) words_.set(r_.base(r_.experts), row);
        raise(g_.placed());
    }

    // Own places by owner; those that nobody owns come last.
    void come_home() {
        const Words<Core> own = ids(args_.rank);
        std::uint32_t next[kMaxWorld + 1] = {};
        for (std::uint32_t place = 0; place < r_.places(); ++place) {
            const std::uint32_t owner = r_.owner(own.get(place));
            if (owner < g_.world) ++next[owner + 1];
        }
        for (std::uint32_t owner = 0; owner < g_.world; ++owner) next[owner + 1] += next[owner];
        for (std::uint32_t place = 0; place < r_.places(); ++place) {
            words_.set(r_.home(place), next[r_.owner(own.get(place))]++);
        }
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    const Routing& r_;
    Words<Core> words_;
};

}  // namespace mkernel::ascend::moe
