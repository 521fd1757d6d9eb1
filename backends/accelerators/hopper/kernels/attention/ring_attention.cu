// The launch of ring_attention.hpp's kernel.
#include <algorithm>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/kernels/attention/ring_attention.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper::attention {
namespace {

template <class Element, bool kCausal>
void launch(const RingArgs& args, int blocks, cudaStream_t stream) {
    const auto kernel = &ring_attention<Element, kCausal>;
    int processors = 0;
    cuda::check(
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(RingShared), processors),
        "ring attention");
    if (blocks > 0) processors = std::min(processors, blocks);
    kernel<<<std::min(processors, args.core.tiles), kBlockThreads, sizeof(RingShared), stream>>>(
        args);
    cuda::check(cudaGetLastError(), "ring attention");
}

}  // namespace

void launch_ring(const RingArgs& args, int blocks, bool causal, bool half, cudaStream_t stream) {
    if (half) {
        causal ? launch<__half, true>(args, blocks, stream)
               : launch<__half, false>(args, blocks, stream);
    } else {
        causal ? launch<__nv_bfloat16, true>(args, blocks, stream)
               : launch<__nv_bfloat16, false>(args, blocks, stream);
    }
}

}  // namespace mkernel::hopper::attention
