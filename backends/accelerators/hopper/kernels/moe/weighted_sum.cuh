// Weighted sums of a token's results, 8 elements a thread at a time.
#pragma once

#include "backends/accelerators/hopper/device/workspace.cuh"
#include "backends/accelerators/hopper/kernels/moe/tables.cuh"
#include "backends/accelerators/hopper/kernels/ordered_sum.cuh"

namespace mkernel::hopper::moe {

using collectives::Eight;
using collectives::narrow;
using collectives::widen;

// 8 sums of one thread.
struct Sums {
    float of[8] = {};

    template <class In>
    __device__ void add(float weight, const Eight<In>& found) {
        const In* elements = reinterpret_cast<const In*>(found.v);
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] += weight * widen(elements[i]);
    }
    template <class In>
    __device__ void add(float weight, const char* from) {
        Eight<In> found;
        found.load(from);
        add(weight, found);
    }
    template <class Out>
    __device__ void store(char* to) const {
        if constexpr (sizeof(Out) == 4) {
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                *reinterpret_cast<float4*>(to + i * 4) = {of[i], of[i + 1], of[i + 2], of[i + 3]};
            }
        } else {
            uint4 rounded;
            Out* elements = reinterpret_cast<Out*>(&rounded);
#pragma unroll
            for (int i = 0; i < 8; ++i) narrow(of[i], elements[i]);
            *reinterpret_cast<uint4*>(to) = rounded;
        }
    }
};

// Of the results that a token has on this rank, in the order of slots.
template <class In>
class RankSum {
  public:
    // `y`: rows [rows, width]. `weights`: own, [tokens, top_k]; those of all ranks are at
    // `weights_offset` of the data area. What comes home goes to `rows_offset` there, [W, tokens, width].
    // `sends`: to other ranks; else all goes to the own workspace, with the own weights.
    __device__ RankSum(const Workspace& workspace, const Tables& tables, const char* y,
                       const float* weights, std::uint64_t weights_offset,
                       std::uint64_t rows_offset, int width, bool sends)
        : workspace_(workspace),
          tables_(tables),
          y_(y),
          weights_(weights),
          theirs_(reinterpret_cast<const float*>(workspace.data(workspace.rank) + weights_offset)),
          rows_offset_(rows_offset),
          width_(width),
          sends_(sends) {}

    // 8 columns from `column` on of token `number` of all ranks. Without results nothing is sent.
    __device__ void send(int number, int column) const {
        constexpr int kBatch = 4;  // loads under way
        const int source = number / tables_.tokens;
        const std::int64_t token = number - source * tables_.tokens;
        const int top_k = tables_.top_k;
        const float* const weights =
            (source == workspace_.rank || !sends_
                 ? weights_
                 : theirs_ + std::int64_t{source} * tables_.tokens * top_k) +
            token * top_k;
        const std::int32_t* const rows = tables_.place_row() + std::int64_t{number} * top_k;
        Sums sums;
        bool any = false;
        for (int slot = 0; slot < top_k; slot += kBatch) {
            int row[kBatch];
            Eight<In> found[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) row[i] = slot + i < top_k ? rows[slot + i] : -1;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (row[i] >= 0) {
                    found[i].load(y_ + (std::int64_t{row[i]} * width_ + column) * sizeof(In));
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (row[i] >= 0) sums.add(weights[slot + i], found[i]);
                any = any || row[i] >= 0;
            }
        }
        if (!any) return;
        const std::int64_t to = std::int64_t{workspace_.rank} * tables_.tokens + token;
        char* const home = workspace_.data(sends_ ? source : workspace_.rank) + rows_offset_;
        sums.store<In>(home + (to * width_ + column) * sizeof(In));
    }

  private:
    const Workspace& workspace_;
    const Tables& tables_;
    const char* y_;
    const float* weights_;
    const float* theirs_;
    std::uint64_t rows_offset_;
    int width_;
    bool sends_;
};

}  // namespace mkernel::hopper::moe
