#include "backends/accelerators/hopper/kernels/gemm/gemm_reduce.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_gemm_reduce<__nv_bfloat16, __nv_fp8_e4m3>(const GemmReduceArgs&,
                                                                      GemmVariant, int,
                                                                      cudaStream_t);
}
