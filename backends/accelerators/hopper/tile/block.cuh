// One block of a persistent, warp-specialised GEMM: its sizes, its shared memory, its roles.
//
// A block computes output tiles of 128 x kTileN, one after the other. Three warpgroups: of the first,
// one thread each of its warps loads operands, stores results and, where the op needs it, carries
// finished tiles to peers and from the workspace into the output; the other two warpgroups multiply, 64
// rows each. Two rings in shared memory join loader, multipliers and storer, and run on across tiles:
//
//   stages   loader → multipliers: A [128, 64] and B [64, kTileN] of one step of K; of e4m3 operands a
//            step is 128 elements, as many bytes
//   slices   multipliers → storer: 64 columns of a finished tile
//
// A cluster of kCluster blocks computes tiles one below the other; they need the same B, of which
// each block loads its share into all of them.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"
#include "backends/accelerators/cuda/ptx/sync.cuh"
#include "backends/accelerators/cuda/ptx/tensor.cuh"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

inline constexpr int kTileM = 128;
inline constexpr int kTileK = 64;  // 128 bytes: the width of the swizzle
template <class In>                // elements of an operand in so many bytes
inline constexpr int kStepK = kTileK * 2 / static_cast<int>(sizeof(In));
inline constexpr int kSliceN = 64;  // the same
// The unit that is carried at a time: rows of a slice.
inline constexpr int kPieceRows = 32;
inline constexpr int kPieceBytes = 4096;
inline constexpr int kElementBytes = 2;  // bfloat16, float16
inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 4 * kWarp;
inline constexpr int kMultipliers = 2;  // warpgroups
inline constexpr int kBlockThreads = (1 + kMultipliers) * kWarpgroup;
inline constexpr int kSharedBytes = 227 * 1024;
inline constexpr int kBarrierBytes = 512;  // and counters: what else there is of shared memory

// `kPieceBuffers` of kPieceBytes: 0 where nothing is carried.
template <int kTileN_, int kCluster_, int kSliceSlots_, int kPieceBuffers_ = 0>
struct Config {
    static constexpr int kTileN = kTileN_;
    static constexpr int kCluster = kCluster_;
    static constexpr int kSliceSlots = kSliceSlots_;
    static constexpr int kABytes = kTileM * kTileK * kElementBytes;
    static constexpr int kBBytes = kTileN * kTileK * kElementBytes;
    static constexpr int kStageBytes = kABytes + kBBytes;
    static constexpr int kSliceBytes = kTileM * kSliceN * kElementBytes;
    static constexpr int kPieceBuffers = kPieceBuffers_;
    static constexpr int kStages =
        (kSharedBytes - kSliceSlots * kSliceBytes - kPieceBuffers * kPieceBytes - kBarrierBytes) /
        kStageBytes;
    static constexpr int kShareN = kTileN / kCluster;  // columns of B that one block loads
    // Rows of K of a box of an N-major B: where kShareN is no whole slices, blocks share rows of K instead.
    static constexpr int kBoxDepth = kShareN % kSliceN == 0 ? kTileK : kTileK / kCluster;
    static constexpr int kSlices = kTileN / kSliceN;
    static constexpr int kAccumulators = kTileN / 2;  // floats a thread
    static constexpr bool kPromotes = false;
    static constexpr int kStageScales = 0;  // that come with each stage
    static constexpr bool kGathers = false;
};
// Shared memory goes to stages, which hide the latency of loads, or to slices, which let a finished
// tile leave while the next is multiplied.
using Wide = Config<256, 2, 4>;    // 3 stages: many tiles a block
using Medium = Config<192, 2, 4>;  // 4 stages: where wider tiles fill their last wave badly
using Narrow = Config<128, 1, 4>;  // 5 stages: few tiles in all
using WideCarry = Config<256, 2, 4, 4>;
using MediumCarry = Config<192, 2, 3, 4>;
using NarrowCarry = Config<128, 1, 4, 4>;
// The sizes for e4m3 operands with sums of each step of K added up in float32
// (Multiplier::multiply_promoted): those take as many registers again, of which wider tiles have none left.
struct Promoted : Config<128, 2, 4> {  // 5 stages
    static constexpr bool kPromotes = true;
};
struct PromotedCarry : Config<128, 2, 4, 4> {
    static constexpr bool kPromotes = true;
};

// The sizes for experts (kernels/moe/grouped.cuh), whose rows may be gathered; e4m3 ones too. With each stage of
// these, which is one block of K, come the scales of its rows, then that of each half of its columns.
struct Deep : Config<256, 2, 2> {  // 4 stages
    static constexpr bool kGathers = true;
};
template <class Tiling>
struct Scaled : Tiling {
    static constexpr bool kPromotes = true;
    static constexpr int kStageScales = kTileM + 2;
};

template <class C>
struct Shared {
    alignas(1024) unsigned char stages[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char slices[C::kSliceSlots][C::kSliceBytes];
    alignas(1024) unsigned char pieces[C::kPieceBuffers * kPieceBytes + 16];  // never of no size
    // Of e4m3 operands, those of a tile's columns, or of each stage; the starts of rows that are gathered. None is
    // of no size.
    alignas(16) float scales[C::kStageScales > 0 ? 1 : C::kTileN];
    float stage_scales[C::kStages * C::kStageScales + 1];
    std::uint32_t starts[C::kGathers ? kTileM : 1];
    ptx::Mbarrier full[C::kStages];               // a stage's bytes are there
    ptx::Mbarrier empty[C::kStages];              // all multipliers of the cluster are done with it
    ptx::Mbarrier written[C::kSliceSlots];        // a slice is there
    ptx::Mbarrier drained[C::kSliceSlots];        // the stores have read a slice
    ptx::Mbarrier arrived[C::kPieceBuffers + 1];  // a piece is there
    ptx::Mbarrier turns[C::kPromotes ? kMultipliers : 1];  // a warpgroup may start a product
    std::uint32_t stored;                                  // tiles that the storer has stored
    std::uint64_t epoch;                                   // where warps that exchange share it
};
static_assert(sizeof(Shared<Wide>) <= kSharedBytes && sizeof(Shared<Deep>) <= kSharedBytes &&
              sizeof(Shared<Medium>) <= kSharedBytes &&
              sizeof(Shared<MediumCarry>) <= kSharedBytes &&
              sizeof(Shared<Narrow>) <= kSharedBytes && sizeof(Shared<WideCarry>) <= kSharedBytes &&
              sizeof(Shared<NarrowCarry>) <= kSharedBytes &&
              sizeof(Shared<Promoted>) <= kSharedBytes &&
              sizeof(Shared<PromotedCarry>) <= kSharedBytes &&
              sizeof(Shared<Scaled<Deep>>) <= kSharedBytes &&
              sizeof(Shared<Scaled<Wide>>) <= kSharedBytes);

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

// Returns this thread's warp. The shuffle tells ptxas that a warp has one: what depends on it alone stays in uniform
// registers, addresses of stages above all.
__device__ inline int warp_here() {
    return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
}

template <class C>
__device__ inline Shared<C>& shared_memory() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return *reinterpret_cast<Shared<C>*>(memory);
}

// Called by all threads, before anything else. `loaders`: the number of threads that each arrive once a
// stage.
template <class C>
__device__ inline void open_block(Shared<C>& shared, int loaders = 1) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::kStages; ++stage) {
            shared.full[stage].init(loaders);
            shared.empty[stage].init(C::kCluster * kMultipliers * kWarpgroup / kWarp);
        }
        for (int slot = 0; slot < C::kSliceSlots; ++slot) {
            shared.written[slot].init(kMultipliers * kWarpgroup);
            shared.drained[slot].init(1);
        }
        for (int buffer = 0; buffer < C::kPieceBuffers; ++buffer) shared.arrived[buffer].init(1);
        for (auto& turn : shared.turns) turn.init(kWarpgroup / kWarp);
        shared.stored = 0;
        ptx::publish_barriers();
    }
    if constexpr (C::kCluster > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
}

// Called by all threads, after everything else: no block leaves while another may still write into its shared
// memory.
template <class C>
__device__ inline void close_block() {
    if constexpr (C::kCluster > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
}

// The role of one thread of each of the first warps, and of all of the second and third warpgroup.
enum class Role { loader, storer, sender, receiver, multiplier, idle };

// Returns this thread's role. All roles share the block's 168 registers a thread: ptxas ignores setmaxnreg
// where the roles meet again after their branches, and multipliers have enough.
__device__ inline Role role_here() {
    const int warp = warp_here();
    if (warp >= kWarpgroup / kWarp) return Role::multiplier;
    if (!ptx::elect_one()) return Role::idle;
    if (warp == 0) return Role::loader;
    if (warp == 1) return Role::storer;
    return warp == 2 ? Role::sender : Role::receiver;
}

}  // namespace mkernel::hopper
