#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/accelerators/hopper/kernels/moe/grouped.inl.cuh"

namespace mkernel::hopper::moe {
template cudaError_t launch_grouped<__nv_bfloat16>(const GroupedArgs&, GroupedVariant, int,
                                                   cudaStream_t);
template void load_grouped<__nv_bfloat16>();
}  // namespace mkernel::hopper::moe
