// The launch of ring_attention.hpp's kernel.
#include <algorithm>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/kernels/attention/ring_attention.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper::attention {
namespace {

template <class Element, bool kCausal, bool kByHead, int kWidth>
void launch(const RingArgs& args, int blocks, cudaStream_t stream) {
    const auto kernel = &ring_attention<Element, kCausal, kByHead, kWidth>;
    int processors = 0;
    cuda::check(Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(RingShared<kWidth>),
                               processors),
                "ring attention");
    if (blocks > 0) processors = std::min(processors, blocks);
    kernel<<<std::min(processors, args.core.tiles), kBlockThreads, sizeof(RingShared<kWidth>),
             stream>>>(args);
    cuda::check(cudaGetLastError(), "ring attention");
}

template <class Element, bool kCausal, bool kByHead>
void launch(const RingArgs& args, int blocks, cudaStream_t stream) {
    args.core.width == 64 ? launch<Element, kCausal, kByHead, 64>(args, blocks, stream)
                          : launch<Element, kCausal, kByHead, 128>(args, blocks, stream);
}

template <class Element>
void launch(const RingArgs& args, int blocks, bool causal, bool by_head, cudaStream_t stream) {
    if (by_head) {
        causal ? launch<Element, true, true>(args, blocks, stream)
               : launch<Element, false, true>(args, blocks, stream);
    } else {
        causal ? launch<Element, true, false>(args, blocks, stream)
               : launch<Element, false, false>(args, blocks, stream);
    }
}

}  // namespace

void launch_ring(const RingArgs& args, int blocks, bool causal, bool half, bool by_head,
                 cudaStream_t stream) {
    half ? launch<__half>(args, blocks, causal, by_head, stream)
         : launch<__nv_bfloat16>(args, blocks, causal, by_head, stream);
}

}  // namespace mkernel::hopper::attention
