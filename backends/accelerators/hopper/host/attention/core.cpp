#include "backends/accelerators/hopper/host/attention/core.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/hopper/host/tensor_map.hpp"

namespace mkernel::hopper::attention {
namespace {

constexpr std::int64_t kKeptBytes = 32 << 20;  // of L2, for keys and values

// Returns the number of query heads that are worked on side by side: as many as keep their keys and values in
// L2.
std::int32_t section_of(const Core& core) {
    const std::int64_t of_head = std::int64_t{core.keys} * core.width * kElementBytes * 2;
    const std::int64_t fits =
        std::max<std::int64_t>(kKeptBytes / of_head, 1) * (core.heads / core.kv_heads);
    const std::int32_t heads = core.batch * core.heads;
    std::int32_t section = static_cast<std::int32_t>(std::min<std::int64_t>(fits, heads));
    while (heads % section != 0) --section;
    return section;
}

void check(const Core& core) {
    const bool fits = core.batch > 0 && core.heads > 0 && core.kv_heads > 0 && core.queries > 0 &&
                      core.keys > 0 && core.heads % core.kv_heads == 0 &&
                      (core.width == 64 || core.width == 128) &&
                      (!core.causal || core.queries == core.keys);
    if (fits) return;
    throw std::invalid_argument(std::to_string(core.batch) + " x " + std::to_string(core.heads) +
                                " heads of " + std::to_string(core.queries) + " queries, " +
                                std::to_string(core.kv_heads) + " of " + std::to_string(core.keys) +
                                " keys, " + std::to_string(core.width) +
                                " wide; heads are a multiple of those of keys, 64 or 128 wide" +
                                (core.causal ? ", and causal queries as many as keys" : ""));
}

}  // namespace

CoreArgs core_args(const Core& core) {
    check(core);
    const auto map = [&](const Rows& of, std::int32_t rows, std::int32_t heads, std::uint32_t box) {
        const RowsExtent extent{of.at,      core.width, rows,    heads,
                                core.batch, of.row,     of.head, of.batch};
        return tensor_map(extent, box, core.half);
    };
    CoreArgs args{};
    args.q = map(core.q, core.queries, core.heads, 64);
    args.k = map(core.k, core.keys, core.kv_heads, kCoreKeys);
    args.v = map(core.v, core.keys, core.kv_heads, kCoreKeys);
    args.out = map(core.out, core.queries, core.heads, 64);
    args.lse = core.lse;
    args.counters = core.counters;
    args.heads = core.heads;
    args.kv_heads = core.kv_heads;
    args.queries = core.queries;
    args.keys = core.keys;
    args.width = core.width;
    args.tiles_of_head = (core.queries + kCoreRows - 1) / kCoreRows;
    args.tiles = args.tiles_of_head * core.heads * core.batch;
    args.section = section_of(core);
    args.scale = core.scale;
    args.scale_log2 = core.scale * 1.4426950408889634F;
    return args;
}

void attend(const Core& core, cudaStream_t stream) {
    if (core.width != kCoreWidth) {
        throw std::invalid_argument("heads of " + std::to_string(core.width) +
                                    "; parts are of heads of " + std::to_string(kCoreWidth));
    }
    launch_core(core_args(core), core.causal, core.half, stream);
}

}  // namespace mkernel::hopper::attention
