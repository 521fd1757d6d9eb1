// In place of what decides it: threads of the host have no async proxy, as devices before Hopper.
#pragma once

namespace mkernel::cuda::ptx {

inline constexpr bool kSinceHopper = false;

}  // namespace mkernel::cuda::ptx
