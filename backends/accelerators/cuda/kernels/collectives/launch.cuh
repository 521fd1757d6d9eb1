// Helpers of the collectives' launches: which kernel runs for which elements, and on how many blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::collectives {

inline constexpr std::uint64_t kResultBytes = 2;  // of an element

// `pick(source, result)` returns the kernel for elements of these arguments' types.
template <class Kernel, class Pick>
Kernel of_element(Element element, Pick&& pick) {
    switch (element) {
        case Element::bfloat16:
            return pick(__nv_bfloat16{}, __nv_bfloat16{});
        case Element::float16:
            return pick(__half{}, __half{});
        case Element::float32_to_bfloat16:
            return pick(float{}, __nv_bfloat16{});
        case Element::float32_to_float16:
            return pick(float{}, __half{});
    }
    throw std::invalid_argument("no such element");
}

// Throws unless invariant results are added so: a power of two of terms, of results' type.
inline void check_tree(int terms, Element element) {
    if ((terms & (terms - 1)) != 0 || from_float32(element)) {
        throw std::invalid_argument("a tree of " + std::to_string(terms) +
                                    (from_float32(element) ? " float32" : " 16-bit") +
                                    " terms; expected a power of two, and 16 bits");
    }
}

// Returns the most blocks that the call may have, such that each finds a place.
inline std::uint32_t most_blocks(const Collective& call) {
    if (call.blocks != 0) return call.blocks;
    static std::array<std::atomic<int>, 64>
        known{};  // of each device; asked once: the runtime takes 0.5 us
    int device = 0;
    int processors = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    const auto index = static_cast<std::size_t>(device);
    if (index < known.size()) processors = known[index].load(std::memory_order_relaxed);
    if (processors == 0) {
        cuda::check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                    "cudaDeviceGetAttribute");
        if (index < known.size()) known[index].store(processors, std::memory_order_relaxed);
    }
    return 2 * static_cast<std::uint32_t>(processors);
}

// Launches a kernel that gets ready while the product before it ends: see ptx::wait_for_grid_before.
template <class Args>
void launch_early(void (*kernel)(Args), const Args& args, std::uint32_t blocks, int threads,
                  cudaStream_t stream) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = cuda::since_hopper(kernel) ? 1 : 0;
    cuda::check(cudaLaunchKernelEx(&config, kernel, args), "launch of a collective");
}

}  // namespace mkernel::cuda::collectives
