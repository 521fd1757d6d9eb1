// Tensor maps that kernels make: copies of maps that the host made, for tensors that lie elsewhere.
#pragma once

#include <cuda.h>

#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper::ptx {

// Copies a map to `to`: 128 bytes of global memory, aligned to as many, of this thread alone. Bulk copies of
// this thread may use it when this returns.
__device__ inline void move_map(CUtensorMap* to, const CUtensorMap* from, const void* address) {
    static_assert(sizeof(CUtensorMap) == 8 * sizeof(uint4));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(to),
                 "l"(address)
                 : "memory");
    // Makes what the thread wrote visible to readers of maps.
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(to) : "memory");
}

}  // namespace mkernel::hopper::ptx
