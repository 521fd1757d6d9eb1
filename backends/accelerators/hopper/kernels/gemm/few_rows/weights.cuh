// The way from device memory to a block's partial sums: weights and rows into stages, products, sums into
// shared memory.
#pragma once

#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/block.cuh"

namespace mkernel::hopper {

template <int kRows, class In, bool kNMajorB>
__device__ __forceinline__ void load_few(FewRows<kRows>& shared,
                                         Cursor<FewRows<kRows>::kStages>& cursor,
                                         const FewRowsArgs& args, int column, int first, int end) {
    using S = FewRows<kRows>;
    const Box weights = box_of(args.b, kFewColumns, args.n - column);
    const bool both = column + 64 < args.n;  // halves of an N-major b
    const int bytes = (kNMajorB ? (both ? kFewColumns : kFewColumns / 2) : weights.rows) + args.m;
    for (int step = first; step < end; ++step, cursor.next()) {
        ptx::Mbarrier* full = &shared.full[cursor.slot];
        unsigned char* stage = shared.stages[cursor.slot];
        shared.empty[cursor.slot].wait(cursor.parity ^ 1);
        full->expect(bytes * kFewDepthBytes);
        if constexpr (kNMajorB) {
            ptx::load_box(stage, weights.map, full, column, step * kStepK<In>);
            if (both) {
                ptx::load_box(stage + S::kWeightBytes / 2, weights.map, full, column + 64,
                              step * kStepK<In>);
            }
        } else if (weights.rows > 0) {
            ptx::load_box(stage, weights.map, full, step * kStepK<In>, column);
        }
        ptx::load_box(stage + S::kWeightBytes, &args.a.whole, full, step * kStepK<In>, 0);
    }
}

// Prefetches the weights of the first stages.
template <int kRows, class In, bool kNMajorB>
__device__ __forceinline__ void prefetch_few(const FewRowsArgs& args, int column, int first,
                                             int end) {
    for (int step = first; step < min(end, first + FewRows<kRows>::kStages); ++step) {
        if constexpr (kNMajorB) {
            ptx::prefetch_box(&args.b.whole, column, step * kStepK<In>);
            ptx::prefetch_box(&args.b.whole, column + 64, step * kStepK<In>);
        } else {
            ptx::prefetch_box(&args.b.whole, step * kStepK<In>, column);
        }
    }
}

// Multiplies this warpgroup's 64 columns of b^T by a^T, over `steps` stages.
template <int kRows, class In, bool kNMajorB>
__device__ __forceinline__ void multiply_few(FewRows<kRows>& shared,
                                             Cursor<FewRows<kRows>::kStages>& stage, int group,
                                             int steps, float (&sum)[kRows / 2]) {
    using S = FewRows<kRows>;
    constexpr int kAtomBytes = 1024;
#pragma unroll
    for (float& each : sum) each = 0;
    const bool releases = threadIdx.x % 32 == 0;
    Cursor<S::kStages> before = stage;
    for (int step = 0; step < steps; ++step) {
        shared.full[stage.slot].wait(stage.parity);
        const unsigned char* at = shared.stages[stage.slot];
        std::uint64_t weights = ptx::descriptor(at + group * S::kWeightBytes / 2, 0, kAtomBytes);
        std::uint64_t rows = ptx::descriptor(at + S::kWeightBytes, 0, kAtomBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK; k += 16) {  // of e4m3 twice as many: as many bytes
            ptx::wgmma<In, false, kNMajorB>(sum, weights, rows, true);
            weights += (kNMajorB ? 16 * kTileK * kElementBytes : 16 * kElementBytes) >> 4;
            rows += 16 * kElementBytes >> 4;
        }
        ptx::wgmma_commit();
        if (step > 0) {
            ptx::wgmma_wait<1>();
            if (releases) shared.empty[before.slot].arrive();
        }
        before = stage;
        stage.next();
    }
    ptx::wgmma_wait<0>();
    if (steps > 0 && releases) shared.empty[before.slot].arrive();
}

// Writes the accumulators into the block's partial sums, the first `m` rows of them and perhaps a few more.
template <int kRows>
__device__ __forceinline__ void write_few(FewRows<kRows>& shared, int group, int m,
                                          const float (&sum)[kRows / 2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    float* const at =
        shared.sums() + lane % 4 * 2 * FewRows<kRows>::kPitch + group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
        if (block * 8 >= m) break;
#pragma unroll
        for (int which = 0; which < 4; ++which) {
            at[(block * 8 + which % 2) * FewRows<kRows>::kPitch + which / 2 * 8] =
                sum[block * 4 + which];
        }
    }
}

}  // namespace mkernel::hopper
