// MoE combine, communication kernel (vector cores): rows of y to the ranks of their tokens.
//   1. Items of work: (chunk, home rank), chunk by chunk; blocks take them in turns.
//   2. Before its first write for a home rank a block waits until that has released epoch - 2, whose
//      inbox is about to be overwritten; before its first one in the outbox for all ranks of other
//      nodes. It waits for nothing else.
//   3. The rows of a chunk, place by place: same node, TPUT straight into the inbox there, fence,
//      TNOTIFY; other node, TPUT into the outbox, where they lie as there, fence, NIC put.
#pragma once

#include "backends/accelerators/ascend/isa/launch.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/args.hpp"
#include "backends/accelerators/ascend/kernels/release.hpp"

namespace mkernel::ascend::moe_combine {

template <class Core>
class Comm {
  public:
    Comm(Core& core, const Args& args)
        : core_(core),
          args_(args),
          g_(args.geometry),
          words_(core, args.tables.base),
          buffers_(g_.dtype, g_.features),
          released_(core, args, g_.world) {}

    // Runs the kernel. Returns false if a wait was aborted or timed out.
    bool run() {
        const std::uint32_t others = g_.world - 1;
        for (std::uint32_t item = core_.index(); item < others * g_.chunks();
             item += core_.count()) {
            if (!send(args_.order[1 + item % others], item / others)) return false;
        }
        return true;
    }

  private:
    bool send(std::uint32_t home, std::uint32_t chunk) {
        const moe::Routing& r = g_.routing;
        core_.annotate(chunk);
        const bool near = args_.same_node(home);
        if (!(near ? released_.wait(home) : released_.wait_outbox())) return false;
        const std::uint64_t outbox = g_.outbox(args_.rank, home);
        std::byte* const to = near ? args_.peers[home].inbox : args_.outbox + outbox;
        const std::uint32_t start = words_.count(r.start(home)),
                            begin = words_.count(r.begin(home, g_.token(chunk))),
                            end = words_.count(r.begin(home, g_.token(chunk + 1)));
        for (std::uint32_t place = begin; place < end; ++place) {
            const std::uint32_t row = words_.count(r.rows(home, place));
            core_.tput(home, args_.row(to, start + place), args_.y.sub(row, 0, 1, g_.features),
                       buffers_.ping, buffers_.pong);
        }
        core_.fence();
        const std::uint64_t offset = g_.row_offset(start + begin);
        return announce(core_, args_, home, g_.arrived(args_.rank, chunk),
                        {outbox + offset, offset, g_.row_offset(end - begin)});
    }

    Core& core_;
    const Args& args_;
    const Geometry& g_;
    moe::Words<Core> words_;
    isa::RowBuffers buffers_;
    Released<Core> released_;
};

MKERNEL_ASCEND_KERNEL(aiv, moe_combine, comm, Comm, Args)

}  // namespace mkernel::ascend::moe_combine
