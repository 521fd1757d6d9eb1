// Ring attention by one kernel: out = softmax(scale q kᵀ) v of the own queries and the keys of all ranks, and the
// log-sum-exp of their scores.
//
// Data flow:
//   k, v (own) ──copy engines──▶ slot of every peer's workspace, chunk by chunk, a flag after each (host/attention/transfers.hpp)
//     between nodes ──crossing──▶ the same, but a chunk is of one head (cuda/kernels/attention/crossing.hpp)
//   q, own k, v, then what is in the slots, as flags come ──one persistent kernel──▶ out, lse; it ends the call
//
// A tile of queries takes the own keys first, then those of the parts in their order, whichever have arrived:
// results are always the same bits. If `ordered` it takes all keys from the last position to the first, so that
// these bits do not depend on the ranks. The result so far stays in registers, so nothing is rounded between
// parts. Rows, and the rows of a chunk, are multiples of 128; without parts there are any rows.
#pragma once

#include <array>

#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.hpp"

namespace mkernel::hopper::attention {

// The keys of `source`, the first `keys` of its rows, seen by all queries from `first` on.
struct RingPart {
    std::int32_t source, first, keys;
};
using RingParts = std::array<RingPart, kMaxRanks - 1>;

struct Ring {
    Core core;   // the own keys; its counters are zero before the first launch
    Rows slots;  // where keys of the first part lie, laid out as those of any part
    std::int64_t
        values;  // elements from there to its values, and from these to the next part's keys
    RingParts parts;
    std::int32_t count;       // of them
    std::int32_t chunk_rows;  // of a rank's rows; each has a flag (host/attention/transfers.hpp)
    bool by_head;             // each of a head's (cuda/kernels/attention/crossing.hpp)
    std::int32_t blocks;      // at most; 0: one a multiprocessor
    bool exchanges;           // waits for flags and ends the call, else parts are taken as they lie
    bool ordered;             // keys by position, those of every other rank; invariant results
};

// Queues ring attention on the current device's `stream`, may be captured. CudaError; std::invalid_argument.
void attend_ring(const DeviceWorld& world, const Ring& ring, cudaStream_t stream);

// The kernel's arguments.
struct RingArgs {
    CoreArgs core;
    CUtensorMap slots;  // of parts, K and V by turns: boxes of 64 elements by kCoreKeys rows
    Workspace workspace;
    transport::WaitLimits limits;
    RingParts parts;
    std::int32_t count, chunk_rows, chunks;  // chunks of a rank
    bool exchanges, ordered;
    std::int32_t of_head;  // chunks of a head, if each has its own
};

void launch_ring(const RingArgs& args, int blocks, bool causal, bool half, bool by_head,
                 cudaStream_t stream);

}  // namespace mkernel::hopper::attention
