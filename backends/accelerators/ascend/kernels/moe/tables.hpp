// MoE dispatch, vector part of the compute kernel: routing tables (routing.hpp, args.hpp) by scalar
// instructions, shared by all blocks.
//   1. Each chunk of each source: go through its ids, once; note the places that have their row here,
//      count them, and the rows that each own expert gets; of own chunks, also the places that each
//      rank owns.
//   2. When all are counted, each source: the first row of each of its chunks for each expert, by
//      expert, then source, then chunk; and its places before each chunk.
//   3. While the tokens of others travel: each own chunk, where results come home.
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

    // Builds the tables, by all blocks together. Returns false if a wait was aborted or timed out.
    bool build() {
        const std::uint32_t chunks = g_.world * g_.chunks();
        for (std::uint32_t item = core_.index(); item < chunks; item += core_.count()) {
            if (!count(args_.chunk(item))) return false;
        }
        core_.annotate(kNoAnnotation);
        for (std::uint32_t source = core_.index(); source < g_.world; source += core_.count()) {
            if (!core_.twait(args_.word(g_.counted()), chunks, args_.rank)) return false;
            place(source);
        }
        return wait_placed(core_, args_);
    }

    // Computes, after `build` and by all blocks together, where the results of own places come home, for the
    // combine.
    void come_home() {
        core_.annotate(kNoAnnotation);
        for (std::uint32_t chunk = core_.index(); chunk < g_.chunks(); chunk += core_.count()) {
            come_home(chunk);
        }
    }

    // Waits until the rows of every source are known.
    static bool wait_placed(Core& core, const Args& args) {
        return core.twait(args.word(args.geometry.placed()), args.geometry.world, args.rank);
    }

  private:
    [[nodiscard]] Words<Core> ids(std::uint32_t source) const {
        const isa::GlobalView view = args_.ids(source);
        return {core_, view.base, static_cast<std::uint64_t>(view.row_stride)};
    }

    void raise(Local word) {
        core_.fence();
        core_.tnotify(args_.rank, args_.pad, args_.word(word), 1);
    }

    bool count(const Chunk& chunk) {
        const auto [source, number] = chunk;
        core_.annotate(number);
        if (source != args_.rank && !args_.compute_only &&
            !core_.twait(args_.word(g_.ids(source)), 1, source)) {
            return false;
        }
        for (std::uint32_t expert = 0; expert < r_.experts; ++expert) {
            words_.set(g_.count(source, number, expert), 0);
        }
        const Words<Core> given = ids(source);
        const std::uint32_t first = g_.token(number) * r_.top_k;
        std::uint32_t here = 0, lower = 0, owned[kMaxWorld + 1] = {};
        for (std::uint32_t place = first; place < g_.token(number + 1) * r_.top_k; ++place) {
            const std::int32_t id = given.get(place);
            const std::uint32_t owner = r_.owner(id);
            lower += owner < args_.rank ? 1 : 0;
            ++owned[owner];
            if (owner != args_.rank) continue;
            words_.next(g_.count(source, number, static_cast<std::uint32_t>(id) % r_.experts));
            words_.set(g_.found(source, first + here++), place);
        }
        words_.set(g_.here(source, number), here);
        words_.set(g_.lower(source, number), lower);
        for (std::uint32_t owner = 0; source == args_.rank && owner < g_.world; ++owner) {
            words_.set(g_.owned(number, owner), owned[owner]);
        }
        raise(g_.counted());
        return true;
    }

    void place(std::uint32_t source) {
        std::uint32_t row = 0;
        for (std::uint32_t expert = 0; expert < r_.experts; ++expert) {
            if (source == 0) words_.set(r_.base(expert), row);
            for (std::uint32_t each = 0; each < g_.world; ++each) {
                for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
                    if (each == source) words_.set(g_.first(source, chunk, expert), row);
                    row += words_.count(g_.count(each, chunk, expert));
                }
                if (each == source) words_.set(g_.first(source, g_.chunks(), expert), row);
            }
        }
        if (source == 0) words_.set(r_.base(r_.experts), row);
        std::uint32_t places = 0, lower = 0;
        for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
            words_.set(r_.begin(source, g_.token(chunk)), places);
            places += words_.count(g_.here(source, chunk));
            lower += words_.count(g_.lower(source, chunk));
        }
        words_.set(r_.begin(source, r_.tokens), places);
        words_.set(r_.start(source), lower);
        raise(g_.placed());
    }

    // Orders own places by owner, then place; those that nobody owns come last.
    void come_home(std::uint32_t chunk) {
        // For each owner: the places of all chunks, and of those before this one.
        std::uint32_t all[kMaxWorld] = {}, next[kMaxWorld + 1] = {};
        for (std::uint32_t each = 0; each < g_.chunks(); ++each) {
            for (std::uint32_t owner = 0; owner < g_.world; ++owner) {
                const std::uint32_t owned = words_.count(g_.owned(each, owner));
                all[owner] += owned;
                next[owner] += each < chunk ? owned : 0;
            }
        }
        std::uint32_t owned = 0,
                      before = 0;  // places that somebody owns; such ones of earlier chunks
        for (std::uint32_t owner = 0; owner < g_.world; ++owner) {
            before += next[owner];
            next[owner] += owned;
            owned += all[owner];
        }
        if (chunk == 0) words_.set(r_.homes(), owned);
        const std::uint32_t first = g_.token(chunk) * r_.top_k;
        next[g_.world] = owned + first - before;
        const Words<Core> own = ids(args_.rank);
        for (std::uint32_t place = first; place < g_.token(chunk + 1) * r_.top_k; ++place) {
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
