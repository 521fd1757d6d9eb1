// MoE dispatch, communication kernel (vector cores): ids and tokens to every other rank.
//   1. Blocks are dealt out evenly to the other ranks; where there are more ranks than blocks, a
//      block serves several, one after the other. Blocks of one destination share its chunks.
//   2. Before its first write for a destination a block waits until that has released epoch - 2,
//      whose slots are about to be overwritten. It waits for nothing else.
//   3. The first block of a destination sends the own ids.
//   4. Every block goes through the own ids, in token order, for those of the destination's
//      experts, and sends the tokens that are in its chunks: same node, TPUT straight into the
//      inbox there, fence, TNOTIFY; other node, TPUT into the outbox, fence, NIC put.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
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
          rows_(g_.dtype, g_.hidden) {}

    // False if a wait was aborted or timed out.
    bool run() {
        const std::uint32_t targets = g_.world - 1, blocks = core_.count();
        for (std::uint32_t which = core_.index() % targets; which < targets; which += blocks) {
            const std::uint32_t members =
                blocks > targets ? (blocks - which + targets - 1) / targets : 1;
            const std::uint32_t target = args_.source_order[1 + which];
            if (!serve(target, core_.index() / targets, members)) return false;
        }
        return true;
    }

  private:
    bool serve(std::uint32_t target, std::uint32_t member, std::uint32_t members) {
        if (member >= g_.chunks()) return true;
        core_.annotate(kNoAnnotation);
        if (!wait_released(core_, args_, g_.released(0), target)) return false;
        if (member == 0 && !send_ids(target)) return false;
        std::uint32_t token = 0;
        for (std::uint32_t chunk = 0; chunk < g_.chunks(); ++chunk) {
            core_.annotate(chunk);
            const bool mine = chunk % members == member;
            const std::uint32_t first = chunk * g_.rows_per_chunk;
            std::uint32_t count = 0;
            while (token < g_.routing.tokens && count < g_.rows_per_chunk) {
                const std::uint32_t run = wanted(target, token, g_.rows_per_chunk - count);
                if (mine && run > 0) {
                    core_.tput(target, args_.slot_tokens(slot(target), first + count, run),
                               args_.x.sub(token, 0, run, g_.hidden), rows_.ping, rows_.pong);
                }
                count += run;
                token += run > 0 ? run : 1;
            }
            if (mine && !publish(target, g_.arrived(args_.parity(), args_.rank, chunk),
                                 g_.token_offset(first),
                                 g_.token_offset(first + count) - g_.token_offset(first))) {
                return false;
            }
        }
        return true;
    }

    bool send_ids(std::uint32_t target) {
        const isa::Tile half{.buffer = isa::Buffer::UB,
                             .dtype = isa::DType::int32,
                             .rows = isa::capacity_of(isa::Buffer::UB) / 2 / 4,
                             .cols = 1};
        isa::Tile other = half;
        other.offset = half.bytes();
        core_.tput(target, args_.slot_ids(slot(target)), args_.own_ids, half, other);
        return publish(target, g_.ids(args_.parity(), args_.rank), 0,
                       std::uint64_t{g_.routing.places()} * sizeof(std::int32_t));
    }

    // How many tokens from `token` on, one after another and at most `most`, go to `target`.
    std::uint32_t wanted(std::uint32_t target, std::uint32_t token, std::uint32_t most) {
        std::uint32_t run = 0;
        while (run < most && token + run < g_.routing.tokens && goes(target, token + run)) ++run;
        return run;
    }

    bool goes(std::uint32_t target, std::uint32_t token) {
        for (std::uint32_t slot = 0; slot < g_.routing.top_k; ++slot) {
            const std::uint64_t place = std::uint64_t{token} * g_.routing.top_k + slot;
            if (g_.routing.owner(ids_.get(place)) == target) return true;
        }
        return false;
    }

    // Where this rank writes what `target` gets.
    [[nodiscard]] std::byte* slot(std::uint32_t target) const {
        return args_.same_node(target)
                   ? args_.peers[target].workspace + g_.inbox(args_.parity(), args_.rank)
                   : args_.workspace + g_.outbox(args_.parity(), target);
    }

    // Raises a signal of `target` when these bytes of its slot are there.
    bool publish(std::uint32_t target, std::uint32_t signal, std::uint64_t offset,
                 std::uint64_t bytes) {
        core_.fence();
        if (args_.same_node(target)) {
            core_.tnotify(target, args_.peers[target].pad, args_.signal_base + signal, 1);
            return true;
        }
        return core_.nic_put({.local_offset = g_.outbox(args_.parity(), target) + offset,
                              .remote_offset = g_.inbox(args_.parity(), args_.rank) + offset,
                              .bytes = bytes,
                              .peer = target,
                              .region = args_.region,
                              .signal = args_.signal_base + signal,
                              .value = 1});
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    Words<Core> ids_;
    RowBuffers rows_;
};

MKERNEL_ASCEND_KERNEL(aiv, moe, comm, Comm, Args)

// Sequential view only: waits until everything that other ranks send is here.
template <class Core>
bool await_arrival(Core& core, const Args& args) {
    const Geometry& g = args.geometry;
    for (std::uint32_t i = 1; i < g.world; ++i) {
        const std::uint32_t source = args.source_order[i];
        if (!core.twait(args.signal_base + g.ids(args.parity(), source), args.uses(), source)) {
            return false;
        }
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            core.annotate(chunk);
            const std::uint32_t signal = args.signal_base + g.arrived(args.parity(), source, chunk);
            if (!core.twait(signal, args.uses(), source)) return false;
        }
    }
    return true;
}

}  // namespace mkernel::ascend::moe
