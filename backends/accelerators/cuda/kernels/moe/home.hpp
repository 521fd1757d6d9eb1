// Results of experts on their way home, and their sums there.
//
// By slot, the data of one call flow on rank r like this:
//   y ──send_rows (or the grouped product itself)──▶ place of each row in the workspace of its rank,
//        [tokens, top_k, width] there; then flag W + r of every rank
//   those of all ranks ──sum_slots──▶ out: of each token in the order of its slots
// By rank they flow like this:
//   y, weights of all ranks ──sum_rows──▶ of each token that has rows here, their weighted sum, in the order
//        of slots ──▶ the workspace of its rank, [W, tokens, width] there; then flag W + r
//   those of all ranks ──sum_ranks──▶ out: of each token in the order of ranks
//   Between nodes, by rank alone: sums for a rank of another node go to its place in the outbox, [W, tokens,
//        width] of the area for NICs, and from there by puts (host/moe/far_slots.hpp). They leave in pieces: each
//        sum_rows makes those of one piece's tokens, and the last one sets flag W + r; flags of other nodes are
//        2 W + s * pieces + p
//   Hierarchically (device/rails.cuh) this rank relays for those of its rail, its wards:
//   sum_rows ──▶ sums for ranks of this node: their workspace; for wards of a neighbour n: its workspace, at the
//        place of the rank of this one's place in the ward's node; a piece of both, then flag 2 W + r * pieces + p
//   own sums of a ward's tokens, and those of neighbours ──relay_sums──▶ a node's sum of each token, in the order of
//        ranks, rounded ──▶ the outbox, [nodes - 1, tokens, width] ──put──▶ its place r at the ward
//   sums of the own node, added up in float32, and of others ──sum_ranks──▶ out, in the order of nodes
// Sums are float32 and rounded once, in each of these steps. Invariant results are added up by the one tree instead
// (mkernel/plan/invariance.py), whose leaves are the sums over slots with experts of one group: a rank, and a relay, sends
// the root of its subtree. After a refused routing nothing travels, and out is NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/moe/tables.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::moe {

struct HomeArgs {
    Workspace workspace;
    transport::WaitLimits limits;
    Tables tables;
    const char* y;                 // rows [rows, width]
    const float* weights;          // own, [tokens, top_k]
    char* out;                     // [tokens, width]
    std::uint64_t weights_offset;  // of all ranks' weights in the data area; not those of this rank
    std::uint64_t rows_offset;     // of what comes home
    std::uint64_t outbox_offset;   // of what goes to other nodes
    std::int32_t width;
    std::int32_t first, end;  // tokens of each rank that sum_rows and relay_sums sum
    std::int32_t pieces;      // that sums for another node's rank travel in; 0: there are none
    std::int32_t groups;      // that experts form, of invariant results; 0: others
    bool half;                // float16, else bfloat16: y unless `wide`, and out
    bool wide;                // what travels is float32, and so is y of sum_rows
    bool waits;               // for other ranks; else nothing goes to them either
    bool hierarchical;        // then it waits
};

// All run on `blocks` blocks of the current device's `stream`; may be captured. CudaError. Rows are multiples
// of 16 bytes. The last send or sum of a call ends it.
void send_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream);
void sum_slots(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream);
void sum_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream);
void relay_sums(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream);
void sum_ranks(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream);

// Loads the kernels of sums by rank to the current device (host/moe/ops.hpp: load).
void load_home();

}  // namespace mkernel::cuda::moe
