// The launch of core.hpp's kernel.
#include <algorithm>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper::attention {
namespace {

template <class Element, bool kCausal>
void launch(const CoreArgs& args, cudaStream_t stream) {
    const auto kernel = &attention_core<Element, kCausal>;
    int processors = 0;
    cuda::check(
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(CoreShared), processors),
        "attention's core");
    kernel<<<std::min(processors, args.tiles), kBlockThreads, sizeof(CoreShared), stream>>>(args);
    cuda::check(cudaGetLastError(), "attention's core");
}

}  // namespace

void launch_core(const CoreArgs& args, bool causal, bool half, cudaStream_t stream) {
    if (half) {
        causal ? launch<__half, true>(args, stream) : launch<__half, false>(args, stream);
    } else {
        causal ? launch<__nv_bfloat16, true>(args, stream)
               : launch<__nv_bfloat16, false>(args, stream);
    }
}

}  // namespace mkernel::hopper::attention
