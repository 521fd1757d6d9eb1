// One block of core.hpp: a persistent kernel, warp-specialised.
//
// A tile is 128 queries of a head. One thread loads its queries and then, 128 at a time, the keys and values that they see, the last
// ones first; two warpgroups have 64 queries each. A warpgroup starts the product of the queries with the next keys before the
// weighted sum of the values before, and finds the largest scores while the latter is under way. The two take turns at
// starting products, so that one's weights, in registers, are found under the other's products.
//
// After: Shah et al., "FlashAttention-3", 2024.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/loader.cuh"

namespace mkernel::hopper::attention {

// Called by one thread.
template <bool kCausal, int kWidth>
__device__ inline void load_core(const CoreArgs& args, CoreShared<kWidth>& shared) {
    CoreLoader<kWidth> loader(args, shared);
    for (std::int32_t number = loader.take(); number >= 0; number = loader.take()) {
        const CoreTile tile = core_tile<kCausal>(args, number);
        loader.queries(number, tile, tile.last + 1);
        for (int at = tile.last; at >= 0; --at) loader.own_keys(tile, at);
    }
    loader.end();
}

template <class Element, bool kCausal, int kWidth>
__global__ void __launch_bounds__(kBlockThreads, 1)
    attention_core(const __grid_constant__ CoreArgs args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<CoreShared<kWidth>*>(memory);
    if (threadIdx.x == 0) open_core(shared);
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
        ptx::fewer_registers<24>();
        if (threadIdx.x == 0) load_core<kCausal>(args, shared);
    } else {
        ptx::more_registers<240>();
        CoreGroup<Element, kCausal, kWidth>(args, shared).run();
    }
}

}  // namespace mkernel::hopper::attention
