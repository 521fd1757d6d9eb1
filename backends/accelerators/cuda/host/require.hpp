// Checks of what Python hands over. std::invalid_argument names the value and what is legal.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mkernel::cuda {

inline constexpr std::uint64_t kAlignment = 16;  // of whatever tensor maps and bulk copies address

inline void require(bool holds, const std::string& name, std::int64_t value,
                    const std::string& legal) {
    if (!holds) {
        throw std::invalid_argument(name + " = " + std::to_string(value) + "; expected " + legal);
    }
}

inline void require_positive(const std::string& name, std::int64_t value) {
    require(value >= 1, name, value, "at least 1");
}

inline void require_aligned(const std::string& name, std::uint64_t address) {
    require(address != 0 && address % kAlignment == 0, name, static_cast<std::int64_t>(address),
            "an address that is a multiple of " + std::to_string(kAlignment));
}

}  // namespace mkernel::cuda
