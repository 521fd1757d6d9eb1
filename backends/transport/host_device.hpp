// Functions that both compilers take: g++, and nvcc for host and device.
#pragma once

#ifdef __CUDACC__
#define MKERNEL_HOST_DEVICE __host__ __device__
#else
#define MKERNEL_HOST_DEVICE
#endif
