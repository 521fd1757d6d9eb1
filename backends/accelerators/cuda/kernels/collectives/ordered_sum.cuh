// Sums of several ranks' floats in a fixed order: float32, rounded once to 16 bits; or, of invariant results, in the one
// tree, rounded to the terms' type at each of its nodes, and then to 16 bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/accelerators/cuda/kernels/collectives/elements.cuh"
#include "backends/accelerators/cuda/kernels/collectives/exchange.cuh"
#include "backends/accelerators/cuda/kernels/collectives/tree.cuh"

namespace mkernel::cuda::collectives {

// One thread's sums of 8 elements, from +0 on, so that a term that is -0 changes nothing.
template <class Out>
class Sum8 {
  public:
    template <class More>
    __device__ void add(const Eight<More>& more) {
        const More* elements = reinterpret_cast<const More*>(more.v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum_[i] += widen(elements[i]);
    }
    template <class Node>
    __device__ void add(const Tree<Node>& tree) {
        tree.add_root_to(sum_);
    }
    __device__ uint4 rounded() const {
        static_assert(sizeof(Out) == 2);
        uint4 result;
        Out* elements = reinterpret_cast<Out*>(&result);
#pragma unroll
        for (int i = 0; i < 8; ++i) narrow(sum_[i], elements[i]);
        return result;
    }

  private:
    float sum_[8] = {};
};

// Returns what terms have added up to.
template <class Out, class Terms>
__device__ inline Sum8<Out> total(const Terms& terms) {
    if constexpr (std::is_same_v<Terms, Sum8<Out>>) {
        return terms;
    } else {
        Sum8<Out> sum;
        sum.add(terms);
        return sum;
    }
}

// A row that is added to every row of a result, as it applies to one chunk of the result.
template <class Out>
struct RowOfChunk {
    const Out* row;
    std::uint32_t columns;
    std::uint32_t first;  // column of the chunk's first element

    // Returns 8 elements of the row. `element`: counted in the chunk, a multiple of 8, as the columns are.
    __device__ Eight<Out> eight(std::uint32_t element) const {
        Eight<Out> found;
        found.load(reinterpret_cast<const char*>(row + (first + element) % columns));
        return found;
    }
    __device__ float one(std::uint32_t element) const {
        return widen(row[(first + element) % columns]);
    }
};

// Stores at dst[i], i < count, the sum of `nbytes` of src[0], src[1], ..., src[world - 1], in that order, or kTree, and
// of `bias`, if kBias: registers are scarce here. Called by the whole block. `aligned`: all those addresses
// are multiples of 16.
template <bool kBias, class In, class Out, bool kTree = false>
__device__ void sum_to_each(const Transfers& transfers, int world, std::uint32_t nbytes, int count,
                            const RowOfChunk<Out>& bias, bool aligned) {
    constexpr int kBatch = sizeof(In) == 2 ? 4 : 2;  // loads under way, 16 registers
    constexpr std::uint32_t kWhole = 8 * sizeof(In);
    constexpr std::uint32_t kNarrower = sizeof(In) / sizeof(Out);
    const std::uint32_t whole = aligned ? nbytes / kWhole * kWhole : 0;
    for (std::uint32_t at = threadIdx.x * kWhole; at < whole; at += kThreads * kWhole) {
        TreeOr<kTree, In, Sum8<Out>> terms;
        for (int step = 0; step < world; step += kBatch) {
            Eight<In> eight[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i < world) eight[i].load(transfers.src[step + i] + at);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (step + i < world) terms.add(eight[i]);
            }
        }
        Sum8<Out> sum = total<Out>(terms);
        if constexpr (kBias) sum.add(bias.eight(at / sizeof(In)));
        const uint4 rounded = sum.rounded();
        for (int i = 0; i < count; ++i) ptx::store_16(transfers.dst[i] + at / kNarrower, rounded);
    }
    for (std::uint32_t at = whole + threadIdx.x * sizeof(In); at < nbytes;
         at += kThreads * sizeof(In)) {
        float sum[8] = {};
        [[maybe_unused]] TreeOr<kTree, In, Sum8<Out>> tree;
        for (int step = 0; step < world; ++step) {
            const In term = *reinterpret_cast<const In*>(transfers.src[step] + at);
            if constexpr (kTree) {
                tree.add(
                    uint4{std::uint32_t{reinterpret_cast<const std::uint16_t&>(term)}, 0, 0, 0});
            } else {
                sum[0] += widen(term);
            }
        }
        if constexpr (kTree) tree.add_root_to(sum);
        if constexpr (kBias) sum[0] += bias.one(at / sizeof(In));
        Out rounded;
        narrow(sum[0], rounded);
        for (int i = 0; i < count; ++i) {
            *reinterpret_cast<Out*>(transfers.dst[i] + at / kNarrower) = rounded;
        }
    }
}

}  // namespace mkernel::cuda::collectives
