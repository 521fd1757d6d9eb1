// MoE dispatch, communication kernel (vector cores): ids and tokens to every other rank.
//   1. Items of work: the ids for each other rank; then, chunk by chunk, the tokens for each.
//      Blocks take them in turns.
//   2. Before its first write for a rank a block waits until that has released epoch - 2, whose inbox
//      is about to be overwritten; before its first one in the outbox for all ranks of other nodes. It
//      waits for nothing else.
//   3. Tokens of a chunk that go: those with an expert there, found by going through their ids.
//      Tokens that follow one another travel together. Same node: TPUT straight into the inbox
//      there, fence, TNOTIFY; other node: TPUT into the outbox, fence, NIC put.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/arrival.hpp"
#include "backends/accelerators/ascend/kernels/moe/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::moe {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          ids_(core, args.own_ids.base, static_cast<std::uint64_t>(args.own_ids.row_stride)),
          rows_(g_.dtype, g_.hidden),
          released_(core, args, g_.world) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        const std::uint32_t targets = g_.world - 1;
        for (std::uint32_t item = core_.index(); item < targets * (g_.chunks() + 1);
             item += core_.count()) {
            const std::uint32_t target = args_.order[1 + item % targets];
            const std::uint32_t turn = item / targets;
            core_.annotate(turn == 0 ? kNoAnnotation : turn - 1);
            if (!(args_.same_node(target) ? released_.wait(target) : released_.wait_outbox())) {
                return false;
            }
            if (!(turn == 0 ? send_ids(target) : send_tokens(target, turn - 1))) return false;
        }
        return true;
    }

  private:
    bool send_ids(std::uint32_t target) {
        const isa::RowBuffers words(isa::DType::int32, 1);
        core_.tput(target, args_.slot_ids(slot(target)), args_.own_ids, words.ping, words.pong);
        return publish(target, g_.ids(args_.rank), 0,
                       std::uint64_t{g_.routing.places()} * sizeof(std::int32_t));
    }

    bool send_tokens(std::uint32_t target, std::uint32_t chunk) {
        const std::uint32_t first = g_.token(chunk), end = g_.token(chunk + 1);
        std::uint32_t at = first;
        for (std::uint32_t token = first; token < end; ++token) {
            std::uint32_t run = 0;
            while (token + run < end && goes(target, token + run)) ++run;
            if (run == 0) continue;
            core_.tput(target, args_.slot_tokens(slot(target), at, run),
                       args_.x.sub(token, 0, run, g_.hidden), rows_.ping, rows_.pong);
            at += run;
            token += run;  // which the loop has seen not to go, or is the end
        }
        return publish(target, g_.arrived(args_.rank, chunk), g_.token_offset(first),
                       g_.token_offset(at) - g_.token_offset(first));
    }

    bool goes(std::uint32_t target, std::uint32_t token) {
        for (std::uint32_t slot = 0; slot < g_.routing.top_k; ++slot) {
            const std::uint64_t place = std::uint64_t{token} * g_.routing.top_k + slot;
            if (g_.routing.owner(ids_.get(place)) == target) return true;
        }
        return false;
    }

    // Returns where this rank writes the data for `target`.
    [[nodiscard]] std::byte* slot(std::uint32_t target) const {
        return args_.same_node(target) ? args_.peers[target].inbox + g_.slot(target, args_.rank)
                                       : args_.outbox + g_.slot(args_.rank, target);
    }

    // Adds to a word of `target` when these bytes of its slot are there.
    bool publish(std::uint32_t target, Remote word, std::uint64_t offset, std::uint64_t bytes) {
        core_.fence();
        return announce(
            core_, args_, target, word,
            {g_.slot(args_.rank, target) + offset, g_.slot(target, args_.rank) + offset, bytes});
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Words<Core> ids_;
    isa::RowBuffers rows_;
    Released<Core> released_;
};

MKERNEL_ASCEND_KERNEL(aiv, moe, comm, Comm, Args)

// Waits, in the sequential view only, until everything that other ranks send is here.
template <class Core>
bool await_arrival(Core& core, const Args& args) {
    const Geometry& g = args.geometry;
    for (std::uint32_t step = 1; step < g.world; ++step) {
        const std::uint32_t source = args.order[step];
        if (!core.twait(args.word(g.ids(source)), 1, source)) return false;
    }
    return ascend::await_arrival(core, args);
}

}  // namespace mkernel::ascend::moe
