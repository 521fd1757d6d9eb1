// What device code says beside C++, for headers of kernels that are compiled for the host against the model.
// Include it before them, and the standard library before it.
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "backends/transport/atomics.hpp"
#include "tests/native/model/explore.hpp"

#define __CUDACC__
#define __device__
#define __host__
#define __shared__

namespace mkernel::transport {

inline void fence_system() {
    model::fence();
}

}  // namespace mkernel::transport

inline void __threadfence() {
    mkernel::model::fence();
}

// Relaxed, as CUDA's.
inline std::uint32_t atomicAdd(std::uint32_t* word, std::uint32_t by) {
    return mkernel::transport::shared(*word).fetch_add(by, std::memory_order_relaxed);
}

// Of every kernel. One thread stands for a block.
inline struct {
    unsigned x = 2, y = 1, z = 1;
} gridDim;
inline const struct {
    unsigned x = 1, y = 1, z = 1;
} blockDim;
inline const struct {
    unsigned x = 0, y = 0, z = 0;
} threadIdx;

inline void __syncthreads() {}
