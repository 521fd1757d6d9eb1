// The order in which a rank's chunks leave, decided on the host before launch.
//
// Receivers work on `compute_blocks` output tiles at a time, that is on several row groups at once,
// each from K tile 0 upwards, and share them between the sources that arrive together. So the first
// K chunks of all row groups of a wave go first, then the second ones, and so on; then the next
// wave of row groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"

namespace mkernel::ascend::ag_gemm {

// Returns the order. `sources`: the number of ranks that a receiver consumes side by side
// (kernels/consumption.hpp).
inline std::vector<std::uint32_t> send_order(const Geometry& g, std::uint32_t compute_blocks,
                                             std::uint32_t sources) {
    std::vector<std::uint32_t> order(g.chunks());
    std::iota(order.begin(), order.end(), 0u);
    const std::uint32_t per_wave =
        std::max(1u, divide_up(compute_blocks, g.n_tiles() * std::max(1u, sources)));  // row groups
    const auto key = [&](std::uint32_t chunk) {
        const std::uint32_t tile = chunk * g.tiles_per_chunk;
        const std::uint32_t row_group = tile / g.k_tiles();
        return std::tuple(row_group / per_wave, tile % g.k_tiles(), row_group, chunk);
    };
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t x, std::uint32_t y) { return key(x) < key(y); });
    return order;
}

}  // namespace mkernel::ascend::ag_gemm
