// The grouped product of MoE as the host starts it: tensors and the world in, a kernel on a stream out.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/host/moe/ops.hpp"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper::moe {

// The product rows @ weights. `a`: own tokens where `tokens`, else rows; `permuted`: where tokens are put in
// the order of rows first; 0: they are gathered. `rows`: the number that `out` has, and `a` where it has
// rows. `gated`: weights have 2n columns. `home`: results go to the places of their rows, not to `out`.
// `wide`: they are float32. `waits`: the product waits for other ranks, and sends to them. `ends`: see
// GroupedArgs. `deep`: see GroupedVariant. `row_bytes`: from a row of `a` to the next one, and of `permuted`.
// `pieces`: of tokens, as of cuda::moe::Routing.
// `b_scales`: as in GroupedArgs; 0: operands have 16 bits. `a_scales`: of e4m3 rows [rows, k / 128]; 0: they lie
// behind the rows. `out_scales`: as in GroupedArgs; 0: results are not quantised.
struct GroupedProduct {
    Sizes sizes;
    std::uint64_t routing, a, permuted, b, out, a_scales, b_scales, out_scales, row_bytes;
    std::int32_t rows, n, k, height, pieces;
    bool half, n_major, tokens, gated, wide, home, waits, ends, deep;
    std::int32_t blocks;
};
void grouped(const DeviceWorld& world, const GroupedProduct& product, std::uint64_t stream);

// Loads the kernels of 16-bit operands to the current device, as moe::load does the others.
void load_grouped();

}  // namespace mkernel::hopper::moe
