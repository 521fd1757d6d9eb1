#include "backends/accelerators/hopper/kernels/gemm/few_rows.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_few_rows<__nv_bfloat16, __nv_bfloat16>(const FewRowsArgs&, bool, int,
                                                                   int, cudaStream_t);
}
