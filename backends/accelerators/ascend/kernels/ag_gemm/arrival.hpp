// AllGather+GEMM, sequential view only: waits on one vector core until every chunk of every other
// rank is in place here, so that communication counts as over only when its bytes have arrived.
#pragma once

#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"

namespace mkernel::ascend::ag_gemm {

// False if a wait was aborted or timed out.
template <class Core>
bool await_arrival(Core& core, const Args& args) {
    const Geometry& g = args.geometry;
    for (std::uint32_t i = 1; i < g.world; ++i) {
        const std::uint32_t source = args.source_order[i];
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            core.annotate(chunk);
            const std::uint32_t flag = args.signal_base + g.flag(args.parity(), source, chunk);
            if (!core.twait(flag, args.uses(), source)) return false;
        }
    }
    return true;
}

}  // namespace mkernel::ascend::ag_gemm
