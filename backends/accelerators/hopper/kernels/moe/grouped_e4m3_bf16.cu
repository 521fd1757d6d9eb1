#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/accelerators/hopper/kernels/moe/grouped.inl.cuh"

namespace mkernel::hopper::moe {
template cudaError_t launch_grouped_e4m3<__nv_bfloat16>(const GroupedArgs&, GroupedVariant, int,
                                                        cudaStream_t);
}  // namespace mkernel::hopper::moe
