#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_all_gather_gemm<__nv_bfloat16, __nv_fp8_e4m3>(const AllGatherGemmArgs&,
                                                                          GemmVariant, int,
                                                                          cudaStream_t);
}
