// The kernel of sum_parts.hpp and its launch.
#include "backends/accelerators/cuda/kernels/gemm/sum_parts.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/collectives/launch.cuh"
#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::collectives {
namespace {

constexpr std::uint32_t kChunkElements = 16u << 10;

template <class In, class Out, bool kBias, bool kTree>
__global__ __launch_bounds__(kThreads,
                             2) void sum_parts_kernel(const __grid_constant__ Workspace workspace,
                                                      transport::WaitLimits limits,
                                                      const __grid_constant__ Parts parts,
                                                      Bias bias, bool ends) {
    __shared__ Transfers transfers;
    for (std::uint64_t first = std::uint64_t{blockIdx.x} * kChunkElements; first < parts.elements;
         first += std::uint64_t{gridDim.x} * kChunkElements) {
        const std::uint64_t count = min(std::uint64_t{kChunkElements}, parts.elements - first);
        const bool aligned = set_transfers(transfers, parts.count, [&](int i) {
            transfers.src[i] = static_cast<const char*>(parts.at[i]) + first * sizeof(In);
            transfers.dst[i] = static_cast<char*>(parts.out) + first * sizeof(Out);
        });
        RowOfChunk<Out> row{};
        if constexpr (kBias) {
            row = {static_cast<const Out*>(bias.row), bias.columns,
                   static_cast<std::uint32_t>(first % bias.columns)};
        }
        sum_to_each<kBias, In, Out, kTree>(transfers, parts.count,
                                           static_cast<std::uint32_t>(count * sizeof(In)), 1, row,
                                           aligned);
    }
    if (!ends) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::compute_kernel);
    finish_call(workspace, waiter, workspace.control().state.epoch);
}

using Kernel = void (*)(Workspace, transport::WaitLimits, Parts, Bias, bool);

template <class In, class Out>
Kernel kernel_of(const Bias& bias, bool tree) {
    if constexpr (sizeof(In) == sizeof(Out)) {
        if (tree) {
            return bias.row == nullptr ? sum_parts_kernel<In, Out, false, true>
                                       : sum_parts_kernel<In, Out, true, true>;
        }
    }
    return bias.row == nullptr ? sum_parts_kernel<In, Out, false, false>
                               : sum_parts_kernel<In, Out, true, false>;
}

Kernel kernel_of(Element element, const Bias& bias, bool tree) {
    switch (element) {
        case Element::bfloat16:
            return kernel_of<__nv_bfloat16, __nv_bfloat16>(bias, tree);
        case Element::float16:
            return kernel_of<__half, __half>(bias, tree);
        case Element::float32_to_bfloat16:
            return kernel_of<float, __nv_bfloat16>(bias, tree);
        case Element::float32_to_float16:
            return kernel_of<float, __half>(bias, tree);
    }
    throw std::invalid_argument("no such element");
}

void check(const Parts& parts, Element element, const Bias& bias, std::uint32_t blocks) {
    if (parts.count < 1 || parts.count > kMaxRanks) {
        throw std::invalid_argument("a sum of " + std::to_string(parts.count) + " parts; 1 to " +
                                    std::to_string(kMaxRanks));
    }
    if (parts.tree) check_tree(parts.count, element);
    if (parts.elements == 0 || blocks == 0) {
        throw std::invalid_argument("a sum of " + std::to_string(parts.elements) + " elements on " +
                                    std::to_string(blocks) + " blocks");
    }
    if (bias.row != nullptr &&
        (bias.columns == 0 || bias.columns % 8 != 0 || parts.elements % bias.columns != 0 ||
         reinterpret_cast<std::uintptr_t>(bias.row) % 16 != 0)) {
        throw std::invalid_argument("a bias of " + std::to_string(bias.columns) +
                                    " columns; a multiple of 8 that divides the " +
                                    std::to_string(parts.elements) +
                                    " elements of the sum, aligned to 16 bytes");
    }
}

template <class In, class Out>
void load_kernels() {
    cuda::load_kernel(sum_parts_kernel<In, Out, false, false>);
    cuda::load_kernel(sum_parts_kernel<In, Out, true, false>);
}

}  // namespace

void load_sum_parts() {
    load_kernels<__nv_bfloat16, __nv_bfloat16>();
    load_kernels<__half, __half>();
    load_kernels<float, __nv_bfloat16>();
    load_kernels<float, __half>();
}

void sum_parts(const Workspace& workspace, const transport::WaitLimits& limits, Element element,
               const Parts& parts, const Bias& bias, std::uint32_t blocks, bool ends,
               cudaStream_t stream) {
    check(parts, element, bias, blocks);
    const std::uint64_t chunks = (parts.elements + kChunkElements - 1) / kChunkElements;
    cuda::launch_small("launching the sum of parts", kernel_of(element, bias, parts.tree),
                       static_cast<unsigned>(std::min<std::uint64_t>(blocks, chunks)), kThreads, 0,
                       stream, workspace, limits, parts, bias, ends);
}

}  // namespace mkernel::cuda::collectives
