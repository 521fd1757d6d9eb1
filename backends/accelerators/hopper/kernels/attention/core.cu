// The launch of core.hpp's kernel.
#include <algorithm>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/kernels/attention/core.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper::attention {
namespace {

template <class Element, bool kCausal, int kWidth>
void launch(const CoreArgs& args, cudaStream_t stream) {
    const auto kernel = &attention_core<Element, kCausal, kWidth>;
    int processors = 0;
    cuda::check(Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(CoreShared<kWidth>),
                               processors),
                "attention's core");
    kernel<<<std::min(processors, args.tiles), kBlockThreads, sizeof(CoreShared<kWidth>), stream>>>(
        args);
    cuda::check(cudaGetLastError(), "attention's core");
}

template <class Element, int kWidth>
void launch(const CoreArgs& args, bool causal, cudaStream_t stream) {
    causal ? launch<Element, true, kWidth>(args, stream)
           : launch<Element, false, kWidth>(args, stream);
}

template <class Element>
void launch(const CoreArgs& args, bool causal, cudaStream_t stream) {
    args.width == 64 ? launch<Element, 64>(args, causal, stream)
                     : launch<Element, 128>(args, causal, stream);
}

}  // namespace

void launch_core(const CoreArgs& args, bool causal, bool half, cudaStream_t stream) {
    half ? launch<__half>(args, causal, stream) : launch<__nv_bfloat16>(args, causal, stream);
}

}  // namespace mkernel::hopper::attention
