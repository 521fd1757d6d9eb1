// A ring in shared memory as kernels have them: one warp fills a slot, each of its lanes a word; two others read it and
// free it. `each`: every lane that has read frees it, else one does for its warp after __syncwarp, as kernels do. Both
// are right; what racecheck says of them is in test_hopper_failures.py.
#include <cstdio>
#include <cstring>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"

using mkernel::cuda::ptx::Mbarrier;

constexpr int kSlots = 4, kSteps = 64, kLanes = 32, kReaders = 2;

template <bool kEach>
__global__ void ring(const float* from, float* sums) {
    __shared__ float slots[kSlots][kLanes];
    __shared__ Mbarrier full[kSlots], empty[kSlots];
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) {
            full[slot].init(kLanes);
            empty[slot].init(kEach ? kReaders * kLanes : kReaders);
        }
        mkernel::cuda::ptx::publish_barriers();
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    float sum = 0;
    for (int step = 0; step < kSteps; ++step) {
        const int slot = step % kSlots;
        const unsigned parity = step / kSlots % 2;
        if (warp == 0) {
            empty[slot].wait(parity ^ 1);
            slots[slot][lane] = from[step * kLanes + lane];
            full[slot].arrive();
        } else {
            full[slot].wait(parity);
            sum += slots[slot][kLanes - 1 - lane];
            __syncwarp();
            if (kEach || lane == 0) empty[slot].arrive();
        }
    }
    if (warp > 0) sums[threadIdx.x - kLanes] = sum;
}

int main(int, char** arguments) {
    float *from, *sums;
    cudaMallocManaged(&from, kSteps * kLanes * sizeof(float));
    cudaMallocManaged(&sums, kReaders * kLanes * sizeof(float));
    for (int i = 0; i < kSteps * kLanes; ++i) from[i] = 1;
    const bool each = std::strcmp(arguments[1], "each") == 0;
    (each ? ring<true> : ring<false>)<<<1, (1 + kReaders) * kLanes>>>(from, sums);
    bool right = cudaDeviceSynchronize() == cudaSuccess;
    for (int i = 0; i < kReaders * kLanes; ++i) right = right && sums[i] == kSteps;
    std::puts(right ? "right" : "wrong");
    return right ? 0 : 1;
}
