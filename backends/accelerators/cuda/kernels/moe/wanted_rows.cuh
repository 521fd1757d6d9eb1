// Rows of tokens that go to the ranks of a node which want them, a warp a row.
#pragma once

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda::moe {

static_assert(kMaxRanks <= 32);

// Returns the ranks of this node that have experts of a token, a bit each, given its `top_k` ids. `experts`: of
// one rank. Called by all lanes of a warp.
__device__ inline unsigned wanting(const Workspace& workspace, const std::int32_t* ids, int top_k,
                                   int experts) {
    unsigned ranks = 0;
    for (int slot = static_cast<int>(threadIdx.x) % 32; slot < top_k; slot += 32) {
        const int id = ids[slot];
        if (id < 0 || id >= experts * workspace.world) continue;
        const int rank = id / experts;
        if (workspace.near(rank)) ranks |= 1u << rank;
    }
    return __reduce_or_sync(0xFFFFFFFFu, ranks);
}

// Copies a row to `place(rank)` of each rank that has a bit in `ranks`. `nbytes`: a multiple of 16. Called by all
// lanes of a warp.
template <class Place>
__device__ inline void copy_row(const char* from, std::int64_t nbytes, unsigned ranks,
                                Place&& place) {
    constexpr int kAhead = 8;  // loads of a lane under way
    if (ranks == 0) return;
    for (std::int64_t at = threadIdx.x % 32 * 16; at < nbytes; at += kAhead * 512) {
        uint4 found[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (at + i * 512 < nbytes) found[i] = ptx::load_16(from + at + i * 512);
        }
        for (unsigned left = ranks; left != 0; left &= left - 1) {
            char* const there = place(__ffs(static_cast<int>(left)) - 1) + at;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (at + i * 512 < nbytes) ptx::store_16(there + i * 512, found[i]);
            }
        }
    }
}

}  // namespace mkernel::cuda::moe
