#include "backends/accelerators/cuda/kernels/moe/quantise_rows.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/accelerators/cuda/kernels/e4m3.cuh"
#include "backends/accelerators/cuda/ptx/matrix.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // of a block of a row
constexpr int kEach = kScaledBlock / kLanes;

// Quantises this lane's elements, 16 bytes, of a block that half a warp has. Returns the scale of the block.
template <class Element>
__device__ float quantise(const char* from, uint2& to, unsigned lanes) {
    const uint4 found = ptx::load_16(from);
    const std::uint32_t four[4] = {found.x, found.y, found.z, found.w};
    float2 wide[kEach / 2];
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
        wide[i] = ptx::unpack<Element>(four[i]);
        most = max(most, max(size_bits(wide[i].x), size_bits(wide[i].y)));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(lanes, most, step));
    }
    const float scale = e4m3_scale(most);
    const Quantiser quantiser(scale);
    std::uint32_t both[kEach / 4];
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        const float2 low = wide[2 * i];
        const float2 high = wide[2 * i + 1];
        both[i] = quantiser.two(low.x, low.y) |
                  static_cast<std::uint32_t>(quantiser.two(high.x, high.y)) << 16;
    }
    to = {both[0], both[1]};
    return scale;
}

__global__ void __launch_bounds__(kThreads)
    quantise_rows_kernel(const __grid_constant__ QuantiseArgs args) {
    const int across = args.width / kScaledBlock;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const unsigned lanes = 0xFFFFu << (threadIdx.x % 32 / kLanes * kLanes);
    const std::int64_t item =
        (std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x)) / kLanes;
    if (item >= std::int64_t{args.rows} * across) return;
    const std::int64_t row = item / across;
    const int block = static_cast<int>(item % across);
    const std::int64_t at = item * kScaledBlock + lane * kEach;
    uint2 found;
    float scale;
    if (args.scales != nullptr) {
        found = *reinterpret_cast<const uint2*>(args.x + at);
        scale = args.scales[item];
    } else if (args.half) {
        scale = quantise<__half>(args.x + 2 * at, found, lanes);
    } else {
        scale = quantise<__nv_bfloat16>(args.x + 2 * at, found, lanes);
    }
    char* const out = args.out + row * args.row_bytes;
    *reinterpret_cast<uint2*>(out + block * kScaledBlock + lane * kEach) = found;
    float* const scales = reinterpret_cast<float*>(out + args.width);
    if (lane == 0) scales[block] = scale;
    const int padded = (args.row_bytes - args.width) / static_cast<int>(sizeof(float));
    if (block == across - 1 && lane > 0 && block + lane < padded) scales[block + lane] = 0;
}

}  // namespace

void quantise_rows(const QuantiseArgs& args, cudaStream_t stream) {
    const std::int64_t lanes = std::int64_t{args.rows} * (args.width / kScaledBlock) * kLanes;
    if (lanes == 0) return;
    cuda::launch_small("launching the quantisation of rows", quantise_rows_kernel,
                       static_cast<unsigned>((lanes + kThreads - 1) / kThreads), kThreads, 0,
                       stream, args);
}

}  // namespace mkernel::cuda::moe
