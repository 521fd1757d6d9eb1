#include "backends/accelerators/hopper/kernels/gemm/mailed_tiles.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_mailed_tiles<__nv_bfloat16>(const FewRowsArgs&, GemmVariant, int,
                                                        cudaStream_t);
}
