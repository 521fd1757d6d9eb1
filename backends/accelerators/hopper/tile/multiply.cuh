// The multipliers' side: products of the stages into registers, sums with tiles that came from other
// ranks, and the finished tile into slices. A warpgroup holds 64 rows of the tile, thread t of it the
// accumulators that ptx/wgmma.cuh describes.
#pragma once

#include "backends/accelerators/cuda/kernels/e4m3.cuh"
#include "backends/accelerators/cuda/ptx/matrix.cuh"
#include "backends/accelerators/cuda/ptx/sync.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/ptx/wgmma.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"
#include "backends/accelerators/hopper/tile/operand_scales.cuh"

namespace mkernel::hopper {

// Element: the type of results. In: that of operands.
template <class C, class Element, bool kNMajorB, class In = Element>
class Multiplier {
  public:
    __device__ explicit Multiplier(Shared<C>& shared)
        : shared_(shared),
          group_(warp_here() / (kWarpgroup / kWarp) - 1),
          lane_(static_cast<int>(threadIdx.x) % 32) {
        // Row of a 64-column slice that this lane names to stmatrix and ldmatrix: blocks 0 and 1 are
        // one below the other, blocks 2 and 3 are right of them.
        const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
        row_ = group_ * 64 + warp * 16 + lane_ % 16;
    }

    // Multiplies the tile: `steps` stages, in order of K; with none of them, the results are zeros.
    __device__ __forceinline__ void multiply(int steps) {
#pragma unroll
        for (float& each : sum_) each = 0;
        Cursor<C::kStages> before = stage_;
        for (int step = 0; step < steps; ++step) {
            shared_.full[stage_.slot].wait(stage_.parity);
            const unsigned char* a = shared_.stages[stage_.slot] + group_ * 64 * kRowBytes;
            const unsigned char* b = shared_.stages[stage_.slot] + C::kABytes;
            std::uint64_t a_place = ptx::descriptor(a, 0, kAtomBytes);
            std::uint64_t b_place =
                ptx::descriptor(b, kNMajorB ? kTileK * kRowBytes : 0, kAtomBytes);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kTileK; k += 16) {
                ptx::wgmma<In, kNMajorB>(sum_, a_place, b_place, true);
                a_place += 16 * kElementBytes >> 4;
                b_place += (kNMajorB ? 16 * kRowBytes : 16 * kElementBytes) >> 4;
            }
            ptx::wgmma_commit();
            if (step > 0) {
                ptx::wgmma_wait<1>();
                release(before.slot);
            }
            before = stage_;
            stage_.next();
        }
        ptx::wgmma_wait<0>();
        if (steps > 0) release(before.slot);
    }

    // Multiplies 2^kLevels segments of K, of `steps` stages each, and adds them by the tree of invariant results
    // (mkernel/plan/invariance.py): each segment and each node is rounded to Element, and +0 instead of -0.
    template <int kLevels>
    __device__ __forceinline__ void multiply_segments(int steps) {
        if constexpr (kLevels == 0) {
            multiply(steps);
        } else {
            multiply_segments<kLevels - 1>(steps);
            std::uint32_t left[C::kAccumulators / 2];
#pragma unroll
            for (int i = 0; i < C::kAccumulators / 2; ++i) {
                left[i] = ptx::pack<Element>(sum_[2 * i], sum_[2 * i + 1]);
            }
            multiply_segments<kLevels - 1>(steps);
#pragma unroll
            for (int i = 0; i < C::kAccumulators / 2; ++i) {
                const float2 two = ptx::unpack<Element>(left[i]);
                sum_[2 * i] += two.x;
                sum_[2 * i + 1] += two.y;
            }
        }
#pragma unroll
        for (int i = 0; i < C::kAccumulators; i += 2) {
            const float2 two = ptx::unpack<Element>(ptx::pack<Element>(sum_[i], sum_[i + 1]));
            sum_[i] = two.x + 0.0F;
            sum_[i + 1] = two.y + 0.0F;
        }
    }

    // Multiplies a tile of e4m3 operands, from `column` of `columns` of the matrix on, and applies their
    // scales. `of_rows()` returns where those of the tile's first row lie once they are there, for `rows`
    // rows from it on.
    template <class OfRows>
    __device__ __forceinline__ void multiply_scaled(int steps, const OperandScales& scales,
                                                    int rows, int column, int columns,
                                                    OfRows&& of_rows) {
        fetch_scales(scales.of_columns, column, columns, scales.single);
        if constexpr (C::kPromotes) {
            multiply_promoted(steps);
        } else {
            multiply(steps);
        }
        scale(of_rows(), rows, scales.of_columns, scales.single);
    }

    // Multiplies a tile of e4m3 operands whose scales come with its stages.
    __device__ __forceinline__ void multiply_blocks(int steps) {
        static_assert(C::kStageScales > 0);
        multiply_promoted(steps);
    }

    // The first row of the tile that this warpgroup holds.
    __device__ int first_row() const { return group_ * 64; }

    // Skips as many stages of a tile none of whose rows are this warpgroup's: the results are zeros.
    __device__ __forceinline__ void skip(int steps) {
#pragma unroll
        for (float& each : sum_) each = 0;
        for (int step = 0; step < steps; ++step) {
            shared_.full[stage_.slot].wait(stage_.parity);
            if constexpr (C::kPromotes) {
                for (int part = 0; part < kParts; ++part) {
                    take_turn();
                    give_turn();
                }
            }
            __syncwarp();
            release(stage_.slot);
            stage_.next();
        }
    }

    // Adds a tile of elements that the loader brought, up to two slices a stage.
    __device__ __forceinline__ void add_tile() {
#pragma unroll
        for (int pair = 0; pair < C::kSlices; pair += 2) {
            shared_.full[stage_.slot].wait(stage_.parity);
#pragma unroll
            for (int half = 0; half < 2 && pair + half < C::kSlices; ++half) {
                const unsigned char* slice = shared_.stages[stage_.slot] + half * C::kSliceBytes;
#pragma unroll
                for (int block = 0; block < 8; block += 2) {
                    std::uint32_t four[4];
                    ptx::load_blocks(four, address(slice, block));
                    float* sum = &sum_[((pair + half) * 8 + block) * 4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 two = ptx::unpack<Element>(four[i]);
                        sum[2 * i] += two.x;
                        sum[2 * i + 1] += two.y;
                    }
                }
            }
            __syncwarp();
            release(stage_.slot);
            stage_.next();
        }
    }

    // Adds bias[column + c] to every row, where there is a bias; `columns`: of the matrix.
    __device__ __forceinline__ void add_bias(const void* bias, int column, int columns) {
        if (bias == nullptr) return;
        const auto* const row = static_cast<const Element*>(bias);
#pragma unroll
        for (int block = 0; block < C::kTileN / 8; ++block) {
            const int at = column + block * 8 + lane_ % 4 * 2;
            if (at < columns) {
                const float2 two =
                    ptx::unpack<Element>(*reinterpret_cast<const std::uint32_t*>(row + at));
                sum_[4 * block] += two.x;
                sum_[4 * block + 1] += two.y;
                sum_[4 * block + 2] += two.x;
                sum_[4 * block + 3] += two.y;
            }
        }
    }

    // Puts op(left, right) of the tile's two halves, column by column, into the left one.
    template <class Op>
    __device__ __forceinline__ void fold(Op&& op) {
#pragma unroll
        for (int i = 0; i < C::kAccumulators / 2; ++i) {
            sum_[i] = op(sum_[i], sum_[i + C::kAccumulators / 2]);
        }
    }

    // Quantises the tile's first `kCount` blocks of 128 columns to e4m3, each row by its largest element there,
    // and passes each block to the storer as one slice. `keep(row, number, scale)` stores a scale.
    template <int kCount, class Keep>
    __device__ __forceinline__ void write_quantised(Keep&& keep) {
        static_assert(kCount * kScaledBlock <= C::kTileN && kScaledBlock == kRowBytes);
#pragma unroll
        for (int number = 0; number < kCount; ++number) {
            const float* const sums = &sum_[number * kScaledBlock / 2];
            shared_.drained[slice_.slot].wait(slice_.parity ^ 1);
            unsigned char* const slice = shared_.slices[slice_.slot];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = row_ - lane_ % 16 + lane_ / 4 + half * 8;
                // Else the addresses below, the same for all tiles, would stay in registers.
                asm volatile("" : "+r"(row));
                unsigned most = 0;
#pragma unroll
                for (int i = 2 * half; i < kScaledBlock / 2; i += 4) {
                    most = max(most, max(size_bits(sums[i]), size_bits(sums[i + 1])));
                }
                most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
                most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
                const float scale = e4m3_scale(most);
                const Quantiser quantiser(scale);
                if (lane_ % 4 == 0) keep(row, number, scale);
#pragma unroll
                for (int block = 0; block < kScaledBlock / 8; ++block) {
                    const float* const sum = &sums[4 * block + 2 * half];
                    unsigned char* const to = slice + row * kRowBytes +
                                              ((block / 2) ^ (row % 8)) * 16 + block % 2 * 8 +
                                              lane_ % 4 * 2;
                    *reinterpret_cast<std::uint16_t*>(to) = quantiser.two(sum[0], sum[1]);
                }
            }
            ptx::fence_async_shared();
            shared_.written[slice_.slot].arrive();
            slice_.next();
        }
    }

    // Rounds the tile's first slices and passes them to the storer, one after another.
    template <int kCount = C::kSlices>
    __device__ __forceinline__ void write() {
#pragma unroll
        for (int slice = 0; slice < kCount; ++slice) {
            shared_.drained[slice_.slot].wait(slice_.parity ^ 1);
#pragma unroll
            for (int block = 0; block < 8; block += 2) {
                const float* sum = &sum_[(slice * 8 + block) * 4];
                std::uint32_t four[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    four[i] = ptx::pack<Element>(sum[2 * i], sum[2 * i + 1]);
                }
                ptx::store_blocks(address(shared_.slices[slice_.slot], block), four);
            }
            ptx::fence_async_shared();
            shared_.written[slice_.slot].arrive();
            slice_.next();
        }
    }

    // Writes the tile's first `rows` rows and `columns` columns, unrounded: `of_row(row)` is where the
    // first column of a row is.
    template <class OfRow>
    __device__ __forceinline__ void write_floats(int rows, int columns, OfRow&& of_row) const {
        const int first = row_ - lane_ % 16 + lane_ / 4;
        const int column = lane_ % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (first + half * 8 >= rows) continue;
            float* const to = of_row(first + half * 8) + column;
#pragma unroll
            for (int block = 0; block < C::kTileN / 8; ++block) {
                if (block * 8 + column < columns) {
                    *reinterpret_cast<float2*>(to + block * 8) = {sum_[4 * block + 2 * half],
                                                                  sum_[4 * block + 2 * half + 1]};
                }
            }
        }
    }

  private:
    // Multiplies e4m3 operands as `multiply` does. Matrix units add them with fewer bits than float32 has, so
    // the products of a step are added up by themselves, and then to the tile's in float32. Warpgroups start their
    // products by turns: what one does with its sums runs beside the other's product.
    __device__ __forceinline__ void multiply_promoted(int steps) {
        static_assert(C::kAccumulators == kParts * kPart);
        float part[kPart];
#pragma unroll
        for (float& each : part) each = 0;
#pragma unroll
        for (float& each : sum_) each = 0;
        for (int step = 0; step < steps; ++step) {
            shared_.full[stage_.slot].wait(stage_.parity);
            const unsigned char* a = shared_.stages[stage_.slot] + group_ * 64 * kRowBytes;
            const unsigned char* b = shared_.stages[stage_.slot] + C::kABytes;
            const std::uint64_t a_place = ptx::descriptor(a, 0, kAtomBytes);
            const std::uint64_t b_place = ptx::descriptor(b, 0, kAtomBytes);
            [[maybe_unused]] float factors[4];
#pragma unroll
            for (int first = 0; first < C::kAccumulators; first += kPart) {
                // Two columns are one accumulator of each thread's two rows.
                const std::uint64_t b_part = b_place + (first * 2 * kRowBytes >> 4);
                take_turn();
                ptx::wgmma_fence();
#pragma unroll
                for (int k = 0; k < kTileK; k += 16) {
                    const int at = k * kElementBytes >> 4;
                    ptx::wgmma<In, false>(part, a_place + at, b_part + at, k > 0);
                }
                ptx::wgmma_commit();
                give_turn();
                if constexpr (C::kStageScales > 0) {
                    if (first == 0) find_factors(factors);
                }
                ptx::wgmma_wait<0>();
                if (first + kPart == C::kAccumulators) release(stage_.slot);
#pragma unroll
                for (int i = 0; i < kPart; ++i) {
                    if constexpr (C::kStageScales > 0) {
                        sum_[first + i] += part[i] * factors[first / kPart * 2 + i % 4 / 2];
                    } else {
                        sum_[first + i] += part[i];
                    }
                }
            }
            stage_.next();
        }
    }

    // Finds the factors of this thread's two rows in the left half of the columns, then in the right one, of
    // the stage that is there.
    __device__ __forceinline__ void find_factors(float (&factors)[4]) const {
        const float* const scales = &shared_.stage_scales[stage_.slot * C::kStageScales];
        const int first = row_ - lane_ % 16 + lane_ / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            factors[i] = scales[first + i % 2 * 8] * scales[kTileM + i / 2];
        }
        __syncwarp();  // one lane frees the stage for all
    }

    // Fetches the scales of a tile's columns while it is multiplied. `of_columns`: those of all `columns`
    // columns of the matrix, of which the tile has those from `column` on; or one, which is not fetched.
    __device__ __forceinline__ void fetch_scales(const float* of_columns, int column, int columns,
                                                 bool single) {
        ptx::meet<kBarrier, kMultipliers * kWarpgroup>();  // the tile before is scaled
        const int at = (static_cast<int>(threadIdx.x) - kWarpgroup) * 2;
        if (single || at >= C::kTileN) return;
        const bool there = column + at < columns;
        ptx::copy_8_ahead(&shared_.scales[at], of_columns + (there ? column + at : 0), there);
    }

    // Multiplies by the scales of the operands. `of_rows`: those of the tile's `rows` rows, from the first
    // on; or one for all. Those of columns: the fetched ones, or one.
    __device__ __forceinline__ void scale(const float* of_rows, int rows, const float* of_columns,
                                          bool single) {
        const int first = row_ - lane_ % 16 + lane_ / 4;
        const float above = ptx::load_arrived(of_rows + (single ? 0 : min(first, rows - 1)));
        const float below = ptx::load_arrived(of_rows + (single ? 0 : min(first + 8, rows - 1)));
        const float one = *of_columns;
        ptx::wait_copies_ahead();
        ptx::meet<kBarrier, kMultipliers * kWarpgroup>();
        const float* const from = &shared_.scales[lane_ % 4 * 2];
#pragma unroll
        for (int block = 0; block < C::kTileN / 8; ++block) {
            float2 two = *reinterpret_cast<const float2*>(from + block * 8);
            if (single) two = {one, one};
            float* const sum = &sum_[4 * block];
            times(sum[0], two.x, above);
            times(sum[1], two.y, above);
            times(sum[2], two.x, below);
            times(sum[3], two.y, below);
        }
    }

    // Multiplies in place: with products that are moved ptxas would spill some.
    __device__ static void times(float& sum, float of_column, float of_row) {
        asm volatile("mul.f32 %0, %0, %1;\n\tmul.f32 %0, %0, %2;"
                     : "+f"(sum)
                     : "f"(of_column), "f"(of_row));
    }

    static constexpr int kRowBytes = kTileK * kElementBytes;  // 128, as of a slice
    static constexpr int kAtomBytes = 8 * kRowBytes;          // what the swizzle permutes
    static constexpr int kBarrier = 1;                        // of the multipliers
    static constexpr int kPart =
        64;  // accumulators of a product of 128 columns: more are none left for
    static constexpr int kParts = C::kAccumulators / kPart;

    // Returns the address of this lane's row of blocks `block` and `block` + 1 of a swizzled slice.
    __device__ std::uint32_t address(const unsigned char* slice, int block) const {
        return ptx::shared_address(slice) + row_ * kRowBytes +
               ((block + lane_ / 16) ^ (row_ % 8)) * 16;
    }

    // Waits until the other warpgroup has given this one its turn. The lower one has the first.
    __device__ __forceinline__ void take_turn() {
        shared_.turns[group_].wait(turn_ ^ 1 ^ group_);
        turn_ ^= 1;
    }
    __device__ __forceinline__ void give_turn() {
        if (lane_ == 0) shared_.turns[1 - group_].arrive();
    }

    __device__ void release(int stage) {
        if constexpr (C::kCluster > 1) {
            if (lane_ < C::kCluster) shared_.empty[stage].arrive_at(lane_);
        } else {
            if (lane_ == 0) shared_.empty[stage].arrive();
        }
    }

    Shared<C>& shared_;
    Cursor<C::kStages> stage_;
    Cursor<C::kSliceSlots> slice_;
    int group_;
    int lane_;
    int row_;
    std::uint32_t turn_ = 0;  // modulo 2: those taken
    float sum_[C::kAccumulators];
};

}  // namespace mkernel::hopper
