// In place of the NICs': few regions, so that a NIC is made quickly.
#pragma once

#define kMaxRegions kAllRegions
#include_next "backends/nics/nic.hpp"
#undef kMaxRegions

namespace mkernel::nics {

inline constexpr std::uint32_t kMaxRegions = 8;

}  // namespace mkernel::nics
