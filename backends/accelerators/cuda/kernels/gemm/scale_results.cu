#include "backends/accelerators/cuda/kernels/gemm/scale_results.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda {
namespace {

constexpr int kEach = 8;  // results of a thread
constexpr unsigned kScaleThreads = 256;
constexpr std::uint64_t kMostBlocks = 132 * 8;

template <class Out>
__global__ __launch_bounds__(kScaleThreads) void scale_results_kernel(ScaleResults results) {
    using collectives::Eight;
    const std::uint32_t across = results.n / kEach;
    const std::uint64_t all = std::uint64_t{results.rows} * across;
    for (std::uint64_t item = std::uint64_t{blockIdx.x} * kScaleThreads + threadIdx.x; item < all;
         item += std::uint64_t{gridDim.x} * kScaleThreads) {
        const auto row = static_cast<std::uint32_t>(item / across);
        const auto column = static_cast<std::uint32_t>(item % across) * kEach;
        Eight<float> product;
        Eight<float> scale;
        product.load(reinterpret_cast<const char*>(results.products + item * kEach));
        scale.load(reinterpret_cast<const char*>(results.of_columns + column));
        Eight<Out> bias{};
        if (results.bias != nullptr) {
            bias.load(
                reinterpret_cast<const char*>(static_cast<const Out*>(results.bias) + column));
        }
        const float of_row = results.of_rows[row];
        const float* products = reinterpret_cast<const float*>(product.v);
        const float* scales = reinterpret_cast<const float*>(scale.v);
        const Out* added = reinterpret_cast<const Out*>(bias.v);
        uint4 rounded;
        Out* elements = reinterpret_cast<Out*>(&rounded);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const float scaled = products[i] * of_row * scales[i];
            collectives::narrow(scaled + collectives::widen(added[i]), elements[i]);
        }
        ptx::store_16(static_cast<char*>(results.out) + item * sizeof(rounded), rounded);
    }
}

}  // namespace

void scale_results(const ScaleResults& results, cudaStream_t stream) {
    for (const void* at : std::initializer_list<const void*>{results.products, results.of_columns,
                                                             results.bias, results.out}) {
        if (reinterpret_cast<std::uintptr_t>(at) % 16 != 0) {
            throw std::invalid_argument("what is scaled is not aligned to 16 bytes");
        }
    }
    if (results.rows == 0 || results.n == 0 || results.n % (2 * kEach) != 0) {
        throw std::invalid_argument(std::to_string(results.rows) + " x " +
                                    std::to_string(results.n) +
                                    " results; at least one row, of a multiple of 16");
    }
    const std::uint64_t items = std::uint64_t{results.rows} * results.n / kEach;
    const std::uint64_t blocks = std::min((items + kScaleThreads - 1) / kScaleThreads, kMostBlocks);
    cuda::launch_small(
        "launching what scales results",
        results.half ? scale_results_kernel<__half> : scale_results_kernel<__nv_bfloat16>,
        static_cast<unsigned>(blocks), kScaleThreads, 0, stream, results);
}

}  // namespace mkernel::cuda
