// The steps of one cube core and its vector cores: for each of its tiles of queries, the tiles of
// keys that they see, in an order that depends only on the shape and on the ranks' places (consumption.hpp),
// so that results do not depend on chunks or on the number of cores. All tiles of queries first meet the own
// keys, while those of other ranks travel; then each goes on with these. Its result so far lies meanwhile in
// scratch memory. For invariant results each tile of queries meets all keys at once, in the order of
// positions: tiles of keys are then the same ones for any number of ranks.
//
// Causal: a tile of keys above the diagonal is left out, one across it is cut and masked. The first
// tile of keys that a tile of queries meets holds the first position of a piece of this rank. Each of
// the queries sees that position, so a running maximum is finite from then on.
#pragma once

#include "backends/accelerators/ascend/kernels/consumption.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/args.hpp"

namespace mkernel::ascend::ring_attention {

struct Step {
    std::uint32_t item = 0;   // counts this core's tiles of queries, each time that one is taken up
    std::uint32_t plane = 0;  // of the queries: batch * heads + head
    std::uint32_t row = 0;    // the first query's, among the rank's positions
    std::uint32_t queries = 0;
    std::uint32_t source = 0, piece = 0;  // of the keys
    std::uint32_t at = 0;                 // the first key's position in the piece
    std::uint32_t keys = 0;
    bool masked = false;
    std::int32_t diagonal = 0;             // masked: query i sees keys up to i + diagonal
    bool first = false, last = false;      // of its tile of queries
    bool resumes = false, pauses = false;  // the first with others' keys, and the last before these
    bool opens = false, goes_on = false;   // first or resumes; others' keys are seen too, later
};

class Steps {
  public:
    Steps(const Args& args, std::uint32_t cube)
        : g_(args.geometry),
          rank_(args.rank),
          cube_(cube),
          own_(g_.pieces() * g_.key_tiles_per_piece()),
          tiles_(args, g_.world, own_, 1),
          apart_(g_.world > 1 && !g_.ordered),
          next_item_(cube) {
        upcoming_ = find();
        advance();
    }

    [[nodiscard]] bool done() const { return done_; }
    [[nodiscard]] const Step& step() const { return step_; }

    void advance() {
        done_ = ended_;
        if (done_) return;
        step_ = upcoming_;
        upcoming_ = find();
        const bool over = ended_ || upcoming_.opens;
        step_.pauses = over && step_.goes_on;
        step_.last = over && !step_.goes_on;
    }

    // Returns how many steps are left, this one included.
    [[nodiscard]] std::uint32_t size() const {
        Steps rest = *this;
        std::uint32_t count = 0;
        for (; !rest.done(); rest.advance()) ++count;
        return count;
    }

  private:
    // Returns the next tile of keys that the queries see, or of the next queries if there is none.
    Step find() {
        while (true) {
            if (place_ == (others_ || !apart_ ? tiles_.size() : own_) || item_.queries == 0) {
                if (next_item_ < g_.items()) {
                    open_item();
                } else if (!others_ && apart_) {
                    others_ = true;
                    next_item_ = cube_;
                    item_.queries = 0;
                } else {
                    ended_ = true;
                    return {};
                }
                continue;
            }
            Step found = item_;
            std::uint32_t tile = place_ % g_.key_tiles_per_piece();
            if (g_.ordered) {
                const std::uint32_t piece = place_ / g_.key_tiles_per_piece();
                found.source = g_.owner(piece);
                found.piece = piece < g_.world ? 0 : 1;
            } else {
                const auto [source, of_source, only] = tiles_[place_];
                found.source = source;
                found.piece = of_source / g_.key_tiles_per_piece();
                tile = of_source % g_.key_tiles_per_piece();
            }
            ++place_;
            found.at = tile * g_.tile_keys();
            found.keys = part_of(g_.piece_rows(), found.at, g_.tile_keys());
            if (!sees(found)) continue;
            if (found.opens) found.item = item_.item = items_++;
            item_.first = item_.resumes = item_.opens = false;
            return found;
        }
    }

    void open_item() {
        const std::uint32_t planes = g_.batch * g_.heads, tiles = g_.tiles_per_piece();
        const std::uint32_t tile = g_.pieces() * tiles - 1 - next_item_ / planes;
        start_ = tile % tiles * g_.tile_queries();
        piece_ = tile / tiles;
        const bool sees_others = apart_ && (!g_.causal || g_.piece(rank_, piece_) > first_other());
        item_ = {.plane = next_item_ % planes,
                 .row = piece_ * g_.piece_rows() + start_,
                 .queries = part_of(g_.piece_rows(), start_, g_.tile_queries()),
                 .first = !others_,
                 .resumes = others_,
                 .opens = true,
                 .goes_on = sees_others && !others_};
        if (others_ && !sees_others) item_.queries = 0;
        next_item_ += g_.cubes;
        place_ = others_ ? own_ : 0;
    }

    // Returns the first piece of the sequence that another rank has.
    [[nodiscard]] std::uint32_t first_other() const { return rank_ == 0 ? 1 : 0; }

    // Returns true where the queries see any of the keys; takes away those after the last query.
    [[nodiscard]] bool sees(Step& step) const {
        if (!g_.causal) return true;
        const std::uint32_t mine = g_.piece(rank_, piece_),
                            theirs = g_.piece(step.source, step.piece);
        if (mine != theirs) return mine > theirs;
        const std::uint32_t end = start_ + step.queries;  // of what they see
        if (step.at >= end) return false;
        if (step.at + step.keys > end) step.keys = end - step.at;
        step.diagonal = static_cast<std::int32_t>(start_) - static_cast<std::int32_t>(step.at);
        step.masked = step.at + step.keys - 1 > start_;
        return true;
    }

    const Geometry& g_;
    std::uint32_t rank_, cube_;
    std::uint32_t own_;  // places of own keys
    Consumption tiles_;
    bool apart_;  // keys of other ranks are met after the own ones of all queries
    std::uint32_t next_item_, items_ = 0;
    std::uint32_t start_ = 0, piece_ = 0;  // of the item's queries
    std::uint32_t place_ = 0;              // of the next keys
    Step item_, step_, upcoming_;
    bool others_ = false;  // keys of other ranks are met now
    bool ended_ = false, done_ = false;
};

}  // namespace mkernel::ascend::ring_attention
