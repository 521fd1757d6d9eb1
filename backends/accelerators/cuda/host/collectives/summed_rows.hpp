// The rows of a plan that calls sum by Lamport exchanges, or normalise after they were summed.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/kernels/collectives/sum_rows.hpp"

namespace mkernel::cuda {

// `eps`: of their norm; none: rows are not normalised.
struct SummedRows {
    RowsOfSums rows;
    std::optional<float> eps;

    // Returns the norm of a call.
    [[nodiscard]] RowNorm norm(const MkernelCall& call) const {
        if (!eps) return {};
        const auto at = [&](int which) { return reinterpret_cast<void*>(call.addresses[which]); };
        return {at(kNormWeight),  at(kResidual),
                at(kResidualOut), *eps,
                at(kQuantised),   static_cast<float*>(at(kQuantisedScale))};
    }

    // Returns the rows of a call, whose terms lie at `from`.
    [[nodiscard]] RowsOfSums of(const MkernelCall& call, const void* from,
                                const Prefetch& prefetch = {}) const {
        RowsOfSums found = rows;
        found.from = from;
        found.out = reinterpret_cast<void*>(call.addresses[kOut]);
        found.norm = norm(call);
        found.prefetch = prefetch;
        return found;
    }

    // Queues the norm of a call's `out`, if there is one, after the kernels that sum it.
    void normalise(const MkernelCall& call, cudaStream_t stream) const {
        if (eps) norm_rows(of(call, reinterpret_cast<const void*>(call.addresses[kOut])), stream);
    }
};

}  // namespace mkernel::cuda
