// The arguments of ring attention's one kernel, made from what it is called with.
#include "backends/accelerators/hopper/kernels/attention/ring_attention.hpp"

#include <stdexcept>
#include <string>

#include "backends/accelerators/hopper/host/attention/core.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"

namespace mkernel::hopper::attention {
namespace {

bool whole_steps(std::int32_t rows) {
    return rows >= 0 && rows % kCoreKeys == 0;
}

void check(const Ring& ring, int world, int rank) {
    const Core& core = ring.core;
    bool fits = core.keys == core.queries && core.keys > 0 &&
                (ring.count == 0 || whole_steps(core.keys)) && ring.chunk_rows > 0 &&
                whole_steps(ring.chunk_rows) && ring.count >= 0 && ring.count < world &&
                (!ring.ordered || ring.count == world - 1) && world <= kMaxRanks;
    for (int part = 0; fits && part < ring.count; ++part) {
        const RingPart& each = ring.parts[part];
        fits = each.source >= 0 && each.source < world && each.source != rank &&
               whole_steps(each.first) && whole_steps(each.keys) && each.keys > 0 &&
               each.keys <= core.keys;
    }
    if (fits) return;
    throw std::invalid_argument(
        std::to_string(ring.count) + " parts of " + std::to_string(world) + " ranks, " +
        std::to_string(core.queries) + " queries, " + std::to_string(core.keys) +
        " keys, chunks of " + std::to_string(ring.chunk_rows) +
        "; each peer has one part at most, and one if keys are taken by position; rows, also of "
        "parts and chunks, are multiples of " +
        std::to_string(kCoreKeys));
}

}  // namespace

void attend_ring(const DeviceWorld& world, const Ring& ring, cudaStream_t stream) {
    RingArgs args{};
    args.workspace = workspace_of(world);
    check(ring, args.workspace.world, args.workspace.rank);
    const Core& core = ring.core;
    args.core = core_args(core);
    if (ring.count > 0) {
        const RowsExtent extent{ring.slots.at,  core.width,     core.keys,       core.kv_heads,
                                core.batch,     ring.slots.row, ring.slots.head, ring.slots.batch,
                                2 * ring.count, ring.values};
        args.slots = tensor_map(extent, kCoreKeys, core.half);
    }
    args.limits = limits_of(world);
    args.parts = ring.parts;
    args.count = ring.count;
    args.chunk_rows = ring.chunk_rows;
    args.of_head = args.chunks = (core.keys + ring.chunk_rows - 1) / ring.chunk_rows;
    if (ring.by_head) {
        args.chunks *= core.batch * core.kv_heads;
        args.core.section = core.heads / core.kv_heads;  // whose keys come together
    }
    args.exchanges = ring.exchanges;
    args.ordered = ring.ordered;
    launch_ring(args, ring.blocks, core.causal, core.half, ring.by_head, stream);
}

}  // namespace mkernel::hopper::attention
