// The work of a warpgroup of core.cuh on its 64 queries, and the memory that it shares with the
// loader.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/matrix.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.hpp"
#include "backends/accelerators/hopper/ptx/wgmma.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper::attention {

inline constexpr int kCoreQueries = 2;      // tiles whose queries are there
inline constexpr int kBoxColumns = 64;      // of a row, in a piece of a tile or step
inline constexpr int kBoxBytes = 64 * 128;  // such a piece of the 64 queries of a warpgroup
inline constexpr float kUnseen =
    -1e30F;  // finite: the weight of none but such is 1, and e^-inf 0 later

template <int kWidth>
struct CoreShared {
    static constexpr int kStages = 256 / kWidth;  // of keys, and of values
    static constexpr int kStepBytes = kCoreKeys * kWidth * kElementBytes;
    static constexpr int kTileBytes = kCoreRows * kWidth * kElementBytes;
    alignas(1024) unsigned char q[kCoreQueries][kTileBytes];  // out, in the end
    alignas(1024) unsigned char k[kStages][kStepBytes];
    alignas(1024) unsigned char v[kStages][kStepBytes];
    ptx::Mbarrier q_full[kCoreQueries], q_empty[kCoreQueries];
    ptx::Mbarrier k_full[kStages], k_empty[kStages];
    ptx::Mbarrier v_full[kStages], v_empty[kStages];
    std::int32_t tile[kCoreQueries];   // of these queries; negative: there are no more
    std::int32_t steps[kCoreQueries];  // of keys that they see
};
static_assert(sizeof(CoreShared<64>) <= kSharedBytes && sizeof(CoreShared<128>) <= kSharedBytes);

struct CoreTile {
    std::int32_t batch, head, kv_head, row;
    std::int32_t
        last;  // step of the keys: the first that is multiplied, the one that may be masked
};

// Returns a tile; the tiles with most keys come first, of as many heads as keep their keys in L2.
template <bool kCausal>
__device__ inline CoreTile core_tile(const CoreArgs& args, std::int32_t number) {
    const std::int32_t of_section = args.section * args.tiles_of_head;
    const std::int32_t rest = number % of_section;
    const std::int32_t up = rest / args.section;
    const std::int32_t row = (kCausal ? args.tiles_of_head - 1 - up : up) * kCoreRows;
    const std::int32_t of_all = number / of_section * args.section + rest % args.section;
    const std::int32_t head = of_all % args.heads;
    const std::int32_t end = kCausal ? min(row + kCoreRows, args.keys) : args.keys;
    return {of_all / args.heads, head, head / (args.heads / args.kv_heads), row,
            (end - 1) / kCoreKeys};
}

// One warpgroup's work. A thread has two queries, rows lane/4 and lane/4 + 8 of its warp's 16.
template <class Element, bool kCausal, int kWidth>
class CoreGroup {
  public:
    __device__ CoreGroup(const CoreArgs& args, CoreShared<kWidth>& shared)
        : args_(args),
          shared_(shared),
          group_(threadIdx.x / kWarpgroup - 1),
          warp_(threadIdx.x % kWarpgroup / kWarp),
          lane_(threadIdx.x % kWarp) {}

    __device__ __forceinline__ void run() {
        Cursor<kCoreQueries> q;
        if (group_ == 1) give_turn();
        while (true) {
            shared_.q_full[q.slot].wait(q.parity);
            const std::int32_t number = shared_.tile[q.slot];
            if (number < 0) break;
            const CoreTile tile = core_tile<kCausal>(args_, number);
            unsigned char* const mine = shared_.q[q.slot] + group_ * kBoxes * kBoxBytes;
            attend(tile, shared_.steps[q.slot], mine);
            write(tile, mine);
            if (threadIdx.x % kWarpgroup == 0) {
                ptx::wait_groups_read<0>();
                shared_.q_empty[q.slot].arrive();
            }
            q.next();
        }
        if (threadIdx.x % kWarpgroup == 0) ptx::wait_groups<0>();
    }

  private:
    __device__ __forceinline__ void attend(const CoreTile& tile, int steps,
                                           const unsigned char* q) {
        await_keys();
        ptx::wgmma_fence();
        start_scores(q);
        ptx::wgmma_wait<0>();
        ptx::hold(scores_);
        release_keys();
        if (kCausal || (tile.last + 1) * kCoreKeys > args_.keys) mask(tile.row, tile.last);
        float by[2];
        sum_[0] = sum_[1] = 0;
        find_top<true>(by);
        weigh(by);
#pragma unroll
        for (float& each : out_) each = 0;
        while (--steps > 0) step(q);
        await_values();
        ptx::wgmma_fence();
        start_sum();
        ptx::wgmma_wait<0>();
        ptx::hold(out_);
        release_values();
    }

    // Works on the next keys, all of which all queries see, and on the previous values.
    __device__ __forceinline__ void step(const unsigned char* q) {
        float by[2];
        await_keys();
        take_turn();
        ptx::wgmma_fence();
        start_scores(q);
        await_values();
        ptx::wgmma_fence();
        start_sum();
        give_turn();
        ptx::wgmma_wait<1>();
        ptx::hold(scores_);
        release_keys();
        find_top<false>(by);
        ptx::wgmma_wait<0>();
        ptx::hold(out_);
        ptx::hold(scores_);
        release_values();
#pragma unroll
        for (int i = 0; i < kOut; i += 4) {
            out_[i] *= by[0];
            out_[i + 1] *= by[0];
            out_[i + 2] *= by[1];
            out_[i + 3] *= by[1];
        }
        weigh(by);
    }

    __device__ __forceinline__ void start_scores(const unsigned char* q) {
        const std::uint64_t a = ptx::descriptor(q, 0, 1024);
        const std::uint64_t b = ptx::descriptor(shared_.k[k_.slot], 0, 1024);
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) {
            const int column = i % 4 * 32;
            ptx::wgmma<Element, false>(scores_, a + (i / 4 * kBoxBytes + column) / 16,
                                       b + (i / 4 * kCoreKeys * 128 + column) / 16, i > 0);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void start_sum() {
        const std::uint64_t b = ptx::descriptor(shared_.v[v_.slot], kCoreKeys * 128, 1024);
#pragma unroll
        for (int i = 0; i < kCoreKeys / 16; ++i) {
            ptx::wgmma<Element, true>(out_, &weights_[4 * i], b + i * 16 * 128 / 16);
        }
        ptx::wgmma_commit();
    }

    // Masks keys beyond the end, or after the query.
    __device__ __forceinline__ void mask(int row, int at) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + first_row() + half * 8;
            const int end = kCausal ? min(query + 1, args_.keys) : args_.keys;
            const int left = end - at * kCoreKeys - lane_ % 4 * 2;
#pragma unroll
            for (int block = 0; block < kCoreKeys / 8; ++block) {
                if (block * 8 >= left) scores_[4 * block + 2 * half] = kUnseen;
                if (block * 8 + 1 >= left) scores_[4 * block + 2 * half + 1] = kUnseen;
            }
        }
    }

    // Finds the largest scores. `by`: the factor for everything summed up so far.
    template <bool kFirst>
    __device__ __forceinline__ void find_top(float (&by)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* const scores = &scores_[2 * half];
            float even = kFirst ? scores[0] : fmaxf(top_[half], scores[0]);
            float odd = scores[1];
#pragma unroll
            for (int i = 4; i < kScores; i += 4) {
                even = fmaxf(even, scores[i]);
                odd = fmaxf(odd, scores[i + 1]);
            }
            float top = fmaxf(even, odd);
            top = fmaxf(top, __shfl_xor_sync(~0U, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0U, top, 2));
            by[half] = kFirst ? 0 : power((top_[half] - top) * args_.scale_log2);
            top_[half] = top;
        }
    }

    // Makes weights of scores, and adds these to their sums times `by`.
    __device__ __forceinline__ void weigh(const float (&by)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* const scores = &scores_[2 * half];
            const float from = top_[half] * args_.scale_log2;
            float even = 0;
            float odd = 0;
#pragma unroll
            for (int i = 0; i < kScores; i += 4) {
                scores[i] = power(fmaf(scores[i], args_.scale_log2, -from));
                scores[i + 1] = power(fmaf(scores[i + 1], args_.scale_log2, -from));
                even += scores[i];
                odd += scores[i + 1];
            }
            sum_[half] = fmaf(sum_[half], by[half], even + odd);
        }
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
            weights_[i] = ptx::pack<Element>(scores_[2 * i], scores_[2 * i + 1]);
        }
    }

    // Writes out, to where the queries were and from there to memory.
    __device__ __forceinline__ void write(const CoreTile& tile, unsigned char* to) {
        float by[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = sum_[half];
            sum += __shfl_xor_sync(~0U, sum, 1);
            sum += __shfl_xor_sync(~0U, sum, 2);
            by[half] = 1 / sum;
            const int row = tile.row + first_row() + half * 8;
            if (lane_ % 4 == 0 && row < args_.queries) {
                const std::int64_t head = std::int64_t{tile.batch} * args_.heads + tile.head;
                args_.lse[head * args_.queries + row] = fmaf(top_[half], args_.scale, logf(sum));
            }
        }
        const int row = warp_ * 16 + lane_ % 16;
        const std::uint32_t from = ptx::shared_address(to) + row * 128;
#pragma unroll
        for (int block = 0; block < kWidth / 8; block += 2) {
            std::uint32_t four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const two = &out_[4 * block + 2 * i];
                four[i] = ptx::pack<Element>(two[0] * by[i % 2], two[1] * by[i % 2]);
            }
            const int column = (block % 8 + lane_ / 16) ^ (row % 8);
            ptx::store_blocks(from + block / 8 * kBoxBytes + column * 16, four);
        }
        ptx::fence_async_shared();
        meet<kWarpgroup>(kWritten + group_);
        if (threadIdx.x % kWarpgroup != 0) return;
        for (int box = 0; box < kBoxes; ++box) {
            ptx::store_box(&args_.out, to + box * kBoxBytes, box * kBoxColumns,
                           tile.row + group_ * 64, tile.head, tile.batch);
        }
        ptx::close_group();
    }

    __device__ static float power(float of) {  // 2 to it
        float found;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(of));
        return found;
    }

    __device__ int first_row() const { return group_ * 64 + warp_ * 16 + lane_ / 4; }

    template <int kThreads>
    __device__ static void meet(int barrier) {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
    }
    __device__ void take_turn() { meet<kMultipliers * kWarpgroup>(kTurn + group_); }
    __device__ void give_turn() {
        asm volatile("bar.arrive %0, %1;" ::"r"(kTurn + 1 - group_), "n"(kMultipliers * kWarpgroup)
                     : "memory");
    }

    __device__ void await_keys() { shared_.k_full[k_.slot].wait(k_.parity); }
    __device__ void await_values() { shared_.v_full[v_.slot].wait(v_.parity); }
    __device__ void release_keys() {
        if (lane_ == 0) shared_.k_empty[k_.slot].arrive();
        k_.next();
    }
    __device__ void release_values() {
        if (lane_ == 0) shared_.v_empty[v_.slot].arrive();
        v_.next();
    }

    static constexpr int kScores = kCoreKeys / 2;  // of a thread
    static constexpr int kOut = kWidth / 2;
    static constexpr int kBoxes = kWidth / kBoxColumns;
    static constexpr int kTurn = 1, kWritten = 3;  // barriers of the block, one a group

    const CoreArgs& args_;
    CoreShared<kWidth>& shared_;
    Cursor<CoreShared<kWidth>::kStages> k_, v_;
    int group_, warp_, lane_;
    float scores_[kScores], out_[kOut];
    std::uint32_t weights_[kScores / 2];
    float top_[2], sum_[2];
};

}  // namespace mkernel::hopper::attention
