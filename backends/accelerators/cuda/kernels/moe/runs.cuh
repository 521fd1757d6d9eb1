// The division of the routing's places among warps, and sums over the lanes of a warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/accelerators/cuda/kernels/moe/tables.cuh"

namespace mkernel::cuda::moe {

inline constexpr unsigned kAll = 0xFFFFFFFFu;

// Runs of places: so many a rank, one after another.
struct Runs {
    int each, places;  // of one rank, of one run

    __device__ Runs(const Tables& tables, int runs) {
        each = runs / tables.world;
        const int own = tables.tokens * tables.top_k;
        places = ((own + each - 1) / each + 31) / 32 * 32;
    }
    // Calls body(place, is one) for 32 places at a time, in the same way on all lanes.
    template <class Body>
    __device__ inline void for_each(const Tables& tables, int run, Body&& body) const {
        const int own = tables.tokens * tables.top_k;
        const int first = run % each * places;
        const int end = run < each * tables.world ? min(first + places, own) : 0;
        const std::int64_t before = std::int64_t{run / each} * own;
        for (int at = first; at < end; at += 32) {
            const int mine = at + static_cast<int>(threadIdx.x) % 32;
            body(before + mine, mine < end);
        }
    }
};

// Returns the sum of the lanes before this one, and in `all` that of all lanes.
__device__ inline int sum_before(int value, int& all) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int sum = value;
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(kAll, sum, by);
        if (lane >= by) sum += other;
    }
    all = __shfl_sync(kAll, sum, 31);
    return sum - value;
}

}  // namespace mkernel::cuda::moe
