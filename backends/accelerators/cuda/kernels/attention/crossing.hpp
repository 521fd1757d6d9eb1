// Keys and values of ring attention that reach the other ranks of a world of several nodes, in chunks.
//
// Data flow of one call on rank r, whose peers are all ranks of other nodes, or hierarchically those of its rail
// (device/rails.cuh):
//   a chunk of k and v ──a block──▶ its slot of each other rank of the node, then its flag there
//                               └──▶ the outbox ──two puts──▶ slot r of each peer, as many rows as that node sees
//   chunk of a peer s ──its word──▶ a block: where areas are staged, slot s of the own data area; hierarchically slot s of
//        each other rank of the node; then its flag on those ranks
// A chunk is some rows of one head of keys and of its values. They travel in the order of heads, in which the kernels that
// read them work, so that each head's queries wait for no other head's keys. What nobody sees is not sent.
//
// A rank's slots lie in the order in which it reads them: first those of its node, the rank before it first, then
// those of other nodes. A slot holds K, then V, each [heads of all batches, rows, width], packed. Behind the slots is the
// outbox, laid out alike.
//
// The kernel runs until everything has come. One that waits for chunks, and may take all multiprocessors, starts after
// `await_crossing`: then all blocks here run. No size comes from the host but those of the call's tensors, so
// a graph may replay it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/attention/parts.hpp"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::attention {

// Returns the number of the slot at `rank` for `source`, of ranks that are `local` to a node.
MKERNEL_HOST_DEVICE inline int slot_of(int rank, int source, int world, int local) {
    const int before = rank % local;  // ranks of the node that are
    const int step = (rank - source + world) % world;
    if (step <= before) return step - 1;
    const bool near = rank / local == source / local;
    return near ? step - 1 - (world - local) : step - 1 + local - 1 - before;
}

// The chunks of one rank's keys and values: of `heads` heads of all batches, `rows` rows of each.
struct KeyChunks {
    std::int32_t heads, rows, chunk_rows;

    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t of_head() const {
        return (rows + chunk_rows - 1) / chunk_rows;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t count() const { return heads * of_head(); }
    // Returns the flag for a chunk of `source`; its word between nodes has the same number.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t flag(int source, std::int32_t chunk) const {
        return static_cast<std::uint32_t>(source * count() + chunk);
    }
};

inline constexpr std::uint32_t kCrossingFlag = kFlags - 1;  // all blocks run

struct KeysCrossing {
    Workspace workspace;
    transport::WaitLimits limits;
    KeyChunks chunks;
    Rows k, v;              // [batch, kv_heads, rows, row_bytes] of this rank
    std::int32_t kv_heads;  // of one batch
    std::int32_t row_bytes;
    std::int32_t put_blocks;  // the first ones, which send; the others land
    bool causal;              // later ranks see the first half of the rows alone
    bool hierarchical;
};

// Queues the crossing on the current device's `stream`, after the end of the previous call; may be captured. CudaError;
// std::invalid_argument.
void cross_keys(const KeysCrossing& args, std::uint32_t land_blocks, cudaStream_t stream);

// Makes later work on `stream` wait until all blocks of the running call's crossing run.
void await_crossing(const Workspace& workspace, const transport::WaitLimits& limits,
                    cudaStream_t stream);

// Loads the kernels to the current device.
void load_crossing();

}  // namespace mkernel::cuda::attention
