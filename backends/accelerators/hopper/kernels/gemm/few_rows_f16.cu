#include "backends/accelerators/hopper/kernels/gemm/few_rows.inl.cuh"

namespace mkernel::hopper {
template cudaError_t launch_few_rows<__half, __half>(const FewRowsArgs&, bool, int, int,
                                                     cudaStream_t);
}
