// One block of a persistent, warp-specialised GEMM: its sizes, its shared memory, its roles.
//
// A block computes output tiles of 128 x kTileN, one after the other. Three warpgroups: the first
// one's warp 0 loads operands (one thread), its warp 1 stores results (one thread); the other two
// multiply, 64 rows each. What joins them are two rings in shared memory, which run on across tiles:
//
//   stages   loader → multipliers: A [128, 64] and B [64, kTileN] of one step of K
//   slices   multipliers → storer: 64 columns of a finished tile
//
// A cluster of kCluster blocks computes tiles one below the other; they need the same B, of which
// each block loads its share into all of them.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/ptx/mbarrier.cuh"
#include "backends/accelerators/hopper/ptx/sync.cuh"
#include "backends/accelerators/hopper/ptx/tensor.cuh"

namespace mkernel::hopper {

inline constexpr int kTileM = 128;
inline constexpr int kTileK = 64;        // 128 bytes: the width of the swizzle
inline constexpr int kSliceN = 64;       // the same
inline constexpr int kTrickleRows = 32;  // of a slice: what is put to a peer at a time
inline constexpr int kElementBytes = 2;  // bfloat16, float16
inline constexpr int kWarpgroup = 128;
inline constexpr int kMultipliers = 2;  // warpgroups
inline constexpr int kBlockThreads = (1 + kMultipliers) * kWarpgroup;
inline constexpr int kSharedBytes = 227 * 1024;

template <int kTileN_, int kCluster_, int kSliceSlots_>
struct Config {
    static constexpr int kTileN = kTileN_;
    static constexpr int kCluster = kCluster_;
    static constexpr int kSliceSlots = kSliceSlots_;
    static constexpr int kABytes = kTileM * kTileK * kElementBytes;
    static constexpr int kBBytes = kTileN * kTileK * kElementBytes;
    static constexpr int kStageBytes = kABytes + kBBytes;
    static constexpr int kSliceBytes = kTileM * kSliceN * kElementBytes;
    static constexpr int kStages = (kSharedBytes - kSliceSlots * kSliceBytes) / kStageBytes;
    static constexpr int kShareN = kTileN / kCluster;  // columns of B that one block loads
    static constexpr int kSlices = kTileN / kSliceN;
    static constexpr int kAccumulators = kTileN / 2;  // floats a thread
};
// Shared memory goes to stages, which hide the latency of loads, or to slices, which let a finished
// tile leave while the next is multiplied.
using Wide = Config<256, 2, 4>;    // 3 stages: many tiles a block
using Deep = Config<256, 2, 2>;    // 4 stages: few tiles a block, each long
using Narrow = Config<128, 1, 4>;  // 5 stages: few tiles in all

template <class C>
struct Shared {
    alignas(1024) unsigned char stages[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char slices[C::kSliceSlots][C::kSliceBytes];
    ptx::Mbarrier full[C::kStages];         // a stage's bytes are there
    ptx::Mbarrier empty[C::kStages];        // every multiplier of the cluster is done with a stage
    ptx::Mbarrier written[C::kSliceSlots];  // a slice is there
    ptx::Mbarrier drained[C::kSliceSlots];  // the stores have read a slice
};
static_assert(sizeof(Shared<Wide>) <= kSharedBytes && sizeof(Shared<Deep>) <= kSharedBytes &&
              sizeof(Shared<Narrow>) <= kSharedBytes);

// A place in a ring of kSlots; `parity` is that of the phase to wait for.
template <int kSlots>
struct Cursor {
    int slot = 0;
    std::uint32_t parity = 0;

    __device__ void next() {
        if (++slot == kSlots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <class C>
__device__ inline Shared<C>& shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return *reinterpret_cast<Shared<C>*>(memory);
}

// All threads, first thing.
template <class C>
__device__ inline void open_block(Shared<C>& shared) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::kStages; ++stage) {
            shared.full[stage].init(1);
            shared.empty[stage].init(C::kCluster * kMultipliers * kWarpgroup / 32);
        }
        for (int slot = 0; slot < C::kSliceSlots; ++slot) {
            shared.written[slot].init(kMultipliers * kWarpgroup);
            shared.drained[slot].init(1);
        }
        ptx::publish_barriers();
    }
    if constexpr (C::kCluster > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
}

// All threads, last thing: no block leaves while another may still write into its shared memory.
template <class C>
__device__ inline void close_block() {
    if constexpr (C::kCluster > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
}

enum class Role { loader, storer, multiplier, idle };

// Hands registers to the multipliers; once, by all threads.
__device__ inline Role take_role() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kWarpgroup / 32) {
        ptx::fewer_registers<40>();
        if (warp > 1 || !ptx::elect_one()) return Role::idle;
        return warp == 0 ? Role::loader : Role::storer;
    }
    ptx::more_registers<232>();
    return Role::multiplier;
}

}  // namespace mkernel::hopper
