#include "backends/accelerators/cuda/kernels/moe/far_slots.cuh"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda {

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kLandingThreads = 512;

// Runs as one warp, of which one thread pushes.
__global__ void put_kernel(const __grid_constant__ Workspace workspace,
                           transport::WaitLimits limits, std::uint64_t from, std::uint64_t step,
                           const __grid_constant__ FarSlots slots, std::uint32_t piece) {
    if (threadIdx.x == 0) put_slots(workspace, limits, from, step, slots, piece);
}

__global__ void __launch_bounds__(kLandingThreads)
    land_kernel(const __grid_constant__ Workspace workspace, transport::WaitLimits limits,
                const __grid_constant__ Landing landing) {
    for (int each = 0; each < landing.count; ++each) {
        land_slots(workspace, limits, landing.slots[each]);
    }
}

void check(const Workspace& workspace, const FarSlots& slots) {
    if (slots.piece_bytes % 4 == 0 && slots.flag + workspace.world * slots.pieces() <= kFlags &&
        slots.offset % 4 == 0 && slots.bytes % 4 == 0) {
        return;
    }
    throw std::invalid_argument("slots of " + std::to_string(slots.bytes) + " bytes at " +
                                std::to_string(slots.offset) + ", flag " +
                                std::to_string(slots.flag) + "; expected multiples of 4, and " +
                                std::to_string(kFlags) + " flags in all");
}

}  // namespace

void load_far_slots() {
    cuda::load_kernel(put_kernel);
    cuda::load_kernel(land_kernel);
}

void put_far(const Workspace& workspace, const transport::WaitLimits& limits, std::uint64_t from,
             std::uint64_t step, const FarSlots& slots, std::uint32_t piece, cudaStream_t stream) {
    check(workspace, slots);
    cuda::launch_small("launching puts to other nodes", put_kernel, 1, kWarp, 0, stream, workspace,
                       limits, from, step, slots, piece);
}

void land_far(const Workspace& workspace, const transport::WaitLimits& limits,
              const Landing& landing, cudaStream_t stream) {
    if (landing.count < 1 || landing.count > kMostFarSlots) {
        throw std::invalid_argument("a landing of " + std::to_string(landing.count) +
                                    " kinds of slots; 1 to " + std::to_string(kMostFarSlots));
    }
    for (int each = 0; each < landing.count; ++each) check(workspace, landing.slots[each]);
    cuda::launch_small("launching what lands from other nodes", land_kernel, 1, kLandingThreads, 0,
                       stream, workspace, limits, landing);
}

}  // namespace mkernel::cuda
