// What of a kernel exists only where it is compiled for compute capability 9.0 or later.
//
// Earlier devices have no bulk copies and so no async proxy, no grids that start early and no clusters: fences and
// waits for these are nothing there. Which code runs is decided by what a kernel was compiled for, not by the device,
// which may be later than the PTX that the driver compiled for it: the host queries cuda::since_hopper.
#pragma once

namespace mkernel::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kSinceHopper = false;
#define MKERNEL_CLUSTER(blocks)
#else
inline constexpr bool kSinceHopper = true;
#define MKERNEL_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

}  // namespace mkernel::cuda::ptx
