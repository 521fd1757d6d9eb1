// The launch of core.hpp's kernel.
#include <algorithm>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper::attention {
namespace {

template <class Element, bool kCausal>
void launch(const CoreArgs& args, cudaStream_t stream) {
    const auto kernel = &attention_core<Element, kCausal, kCoreWidth>;
    int processors = 0;
    cuda::check(Prepared::find(reinterpret_cast<const void*>(kernel),
                               sizeof(CoreShared<kCoreWidth>), processors),
                "attention's core");
    kernel<<<std::min(processors, args.tiles), kBlockThreads, sizeof(CoreShared<kCoreWidth>),
             stream>>>(args);
    cuda::check(cudaGetLastError(), "attention's core");
}

template <class Element>
void launch(const CoreArgs& args, bool causal, cudaStream_t stream) {
    causal ? launch<Element, true>(args, stream) : launch<Element, false>(args, stream);
}

}  // namespace

void launch_core(const CoreArgs& args, bool causal, bool half, cudaStream_t stream) {
    half ? launch<__half>(args, causal, stream) : launch<__nv_bfloat16>(args, causal, stream);
}

}  // namespace mkernel::hopper::attention
