// Weighted sums of a token's results, 8 elements a thread at a time: in one order, or, of invariant results, by groups of
// experts (mkernel/plan/invariance.py).
#pragma once

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/collectives/elements.cuh"
#include "backends/accelerators/cuda/kernels/collectives/tree.cuh"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"

namespace mkernel::cuda::moe {

using collectives::Eight;
using collectives::narrow;
using collectives::Tree;
using collectives::TreeOr;
using collectives::widen;

// Eight sums of one thread.
struct Sums {
    float of[8] = {};

    template <class In>
    __device__ void add(float weight, const Eight<In>& found) {
        const In* elements = reinterpret_cast<const In*>(found.v);
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] = fmaf(weight, widen(elements[i]), of[i]);
    }
    __device__ void add(const Sums& more) {
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] += more.of[i];
    }
    template <class In>
    __device__ void add(float weight, const char* from) {
        Eight<In> found;
        found.load(from);
        add(weight, found);
    }
    // Adds the term of a rank, as a tree does.
    template <class In>
    __device__ void add(const Eight<In>& term, int) {
        add(1.0f, term);
    }
    template <class Node>
    __device__ void add(const Tree<Node>& tree) {
        tree.add_root_to(of);
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

// The groups that the experts of all ranks form.
struct Groups {
    int count, experts;  // count: a power of two

    __device__ int of(int expert) const { return expert * count / experts; }
    __device__ int first_expert(int group) const { return (group * experts + count - 1) / count; }
};

// Adds to `tree` the leaves of a token's slots that name an expert of [first, end), the experts of whole groups:
// add(slot, leaf) adds a slot's result to the leaf of its group, in the order of slots.
template <class Node, class Add>
__device__ void add_leaves(Tree<Node>& tree, const Groups& groups, const std::int32_t* ids,
                           int top_k, int first, int end, Add&& add) {
    while (first < end) {
        const int group = groups.of(first);
        const int behind = groups.first_expert(group + 1);
        int next = end;  // the first expert of a later group that a slot names
        Sums leaf;
        for (int slot = 0; slot < top_k; ++slot) {
            const int expert = ids[slot];
            if (expert >= behind) {
                next = min(next, expert);
            } else if (expert >= first) {
                add(slot, leaf);
            }
        }
        Eight<Node> rounded;
        leaf.store<Node>(reinterpret_cast<char*>(rounded.v));
        tree.add(rounded, group);
        first = next;
    }
}

}  // namespace mkernel::cuda::moe
