// The one tree in which invariant results are added up (mkernel/plan/invariance.py).
#pragma once

#include <type_traits>

#include "backends/accelerators/cuda/kernels/collectives/elements.cuh"
#include "backends/accelerators/cuda/kernels/eight.cuh"

namespace mkernel::cuda::collectives {

// One thread's tree over 8 elements of terms: a node is the float32 sum of its two children, rounded to Node, of 16
// bits. Terms come in the order of leaves; those that never come are +0.
template <class Node>
class Tree {
  public:
    // Adds the term of a leaf; or the root of a subtree, as any of its leaves.
    __device__ void add(uint4 term, int leaf) {
        if (leaf_ >= 0) {
            const int level = 31 - __clz(leaf ^ leaf_);  // of the left child of where both meet
            nodes_[level] = joined((1u << level) - 1);
            waiting_ = (waiting_ >> level | 1u) << level;
        }
        nodes_[kLevels] = term;
        leaf_ = leaf;
    }
    __device__ void add(const Eight<Node>& term, int leaf) { add(term.v[0], leaf); }
    // Adds the term of the next leaf.
    __device__ void add(uint4 term) { add(term, leaf_ + 1); }
    __device__ void add(const Eight<Node>& term) { add(term.v[0]); }
    // Adds the root of what has been added.
    __device__ void add_root_to(float (&sum)[8]) const {
        if (leaf_ >= 0) add_eight<Node>(sum, joined(waiting_));
    }

  private:
    static constexpr int kLevels =
        10;  // above the leaves, of which there are MOST_SEGMENTS at most

    // Returns the last term, and the nodes on these of the levels where one waits for it.
    __device__ uint4 joined(unsigned levels) const {
        uint4 node = nodes_[kLevels];
#pragma unroll 1
        for (levels &= waiting_; levels != 0; levels &= levels - 1) {
            float sum[8] = {};
            add_eight<Node>(sum, nodes_[__ffs(static_cast<int>(levels)) - 1]);
            add_eight<Node>(sum, node);
            node = round_eight<Node>(sum);
        }
        return node;
    }

    // Of each level, the left node that waits for the right one; then the last term. They lie in local memory, which a
    // few hits of the cache cost less than the registers that whatever is loaded ahead of a wait would lack.
    uint4 nodes_[kLevels + 1];
    unsigned waiting_ = 0;  // on which levels one does, a bit each
    int leaf_ = -1;         // of the last term
};

template <bool kTree, class In, class Other>
using TreeOr = typename std::conditional_t<kTree, std::type_identity<Tree<In>>,
                                           std::type_identity<Other>>::type;

}  // namespace mkernel::cuda::collectives
