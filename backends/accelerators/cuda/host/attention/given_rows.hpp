// Checks of attention's tensors and parts, which Python gives. std::invalid_argument.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/attention/parts.hpp"

namespace mkernel::cuda::attention {

inline Rows rows(std::uint64_t address, const std::array<std::int64_t, 3>& strides) {
    constexpr int kElements = 8;  // of 16 bytes
    const bool fits =
        strides[0] % kElements == 0 && strides[1] % kElements == 0 && strides[2] % kElements == 0;
    if (address % 16 != 0 || !fits) {
        throw std::invalid_argument("rows at " + std::to_string(address) +
                                    " do not start at multiples of 16 bytes");
    }
    return {reinterpret_cast<void*>(address), strides[0], strides[1], strides[2]};
}

inline void check_count(std::size_t parts) {
    if (parts <= static_cast<std::size_t>(kMaxRanks)) return;
    throw std::invalid_argument(std::to_string(parts) + " parts; at most " +
                                std::to_string(kMaxRanks));
}

}  // namespace mkernel::cuda::attention
