// The wait for chunks of all other ranks together. An op's geometry defines how many chunks a rank has
// (`chunks`), which word signals one (`arrived`) and, where not every rank gets every chunk, whether this one
// does (`needs`).
#pragma once

#include "backends/accelerators/ascend/kernels/call.hpp"

namespace mkernel::ascend {

// Returns true for another rank's chunk that is sent to this one.
template <class Args>
constexpr bool is_sent_here(const Args& args, std::uint32_t source, std::uint32_t chunk) {
    if constexpr (requires { args.geometry.needs(args.rank, source, chunk); }) {
        return args.geometry.needs(args.rank, source, chunk);
    }
    return true;
}

// Waits until each other rank's chunk of this number is here. Returns false if a wait was aborted or timed
// out.
template <class Core, class Args>
bool wait_arrived(Core& core, const Args& args, std::uint32_t chunk) {
    const auto& g = args.geometry;
    for (std::uint32_t step = 1; step < g.world; ++step) {
        const std::uint32_t source = args.order[step];
        if (!is_sent_here(args, source, chunk)) continue;
        if (!core.twait(args.word(g.arrived(source, chunk)), 1, source)) return false;
    }
    return true;
}

// Ends the comm kernel in the sequential view, on one vector core, so that communication counts as over only
// when its bytes have arrived. Returns false if a wait was aborted or timed out.
template <class Core, class Args>
bool await_arrival(Core& core, const Args& args) {
    for (std::uint32_t chunk = 0; chunk < args.geometry.chunks(); ++chunk) {
        core.annotate(chunk);
        if (!wait_arrived(core, args, chunk)) return false;
    }
    return true;
}

}  // namespace mkernel::ascend
