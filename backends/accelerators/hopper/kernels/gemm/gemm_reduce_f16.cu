#include "backends/accelerators/hopper/kernels/gemm/gemm_reduce.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_gemm_reduce<__half, __half>(const GemmReduceArgs&, GemmVariant, int,
                                                        cudaStream_t);
}
