#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_all_gather_gemm<__half, __half>(const AllGatherGemmArgs&, GemmVariant,
                                                            int, cudaStream_t);
}
