// In place of the NICs': few numbers for groups, so that they are used again soon.
#pragma once

#define kGroups kAllGroups
#include_next "backends/nics/verbs/immediate.hpp"
#undef kGroups

namespace mkernel::nics::verbs {

inline constexpr std::uint32_t kGroups = 2;

}  // namespace mkernel::nics::verbs
