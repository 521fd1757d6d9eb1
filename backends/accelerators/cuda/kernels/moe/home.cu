#include "backends/accelerators/cuda/kernels/moe/home.cuh"

#include <cuda_runtime.h>

#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr unsigned kThreads = 256;

template <class Element>
__global__ void __launch_bounds__(kThreads)
    send_rows_kernel(const __grid_constant__ HomeArgs args) {
    send_rows_of_call<Element>(args);
}

template <class Out, class In>
__global__ void __launch_bounds__(kThreads)
    sum_slots_kernel(const __grid_constant__ HomeArgs args) {
    sum_slots_of_call<Out, In>(args);
}

template <class In>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ HomeArgs args) {
    sum_rows_of_call<In>(args);
}

template <class In>
__global__ void __launch_bounds__(kThreads)
    relay_sums_kernel(const __grid_constant__ HomeArgs args) {
    relay_sums_of_call<In>(args);
}

template <class Out, class In, bool kRelayed>
__global__ void __launch_bounds__(kThreads)
    sum_ranks_kernel(const __grid_constant__ HomeArgs args) {
    sum_ranks_of_call<Out, In, kRelayed>(args);
}

void start(const char* what, void (*kernel)(HomeArgs), const HomeArgs& args, std::uint32_t blocks,
           cudaStream_t stream) {
    cuda::launch_small(what, kernel, blocks, kThreads, 0, stream, args);
}

}  // namespace

void load_home() {
    const auto load = []<class... Kernels>(Kernels... kernels) {
        (cuda::load_kernel(kernels), ...);
    };
    load(sum_rows_kernel<float>, sum_rows_kernel<__half>, sum_rows_kernel<__nv_bfloat16>);
    load(relay_sums_kernel<float>, relay_sums_kernel<__half>, relay_sums_kernel<__nv_bfloat16>);
    const auto load_sums = [&]<bool kRelayed>() {
        load(sum_ranks_kernel<__half, float, kRelayed>,
             sum_ranks_kernel<__nv_bfloat16, float, kRelayed>,
             sum_ranks_kernel<__half, __half, kRelayed>,
             sum_ranks_kernel<__nv_bfloat16, __nv_bfloat16, kRelayed>);
    };
    load_sums.template operator()<false>();
    load_sums.template operator()<true>();
}

void send_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    start("launching the rows home", send_rows_kernel<__half>, args, blocks, stream);
}

void sum_slots(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    void (*kernel)(HomeArgs) = nullptr;
    if (args.wide) {
        kernel =
            args.half ? sum_slots_kernel<__half, float> : sum_slots_kernel<__nv_bfloat16, float>;
    } else {
        kernel = args.half ? sum_slots_kernel<__half, __half>
                           : sum_slots_kernel<__nv_bfloat16, __nv_bfloat16>;
    }
    start("launching the sum over slots", kernel, args, blocks, stream);
}

void sum_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    void (*kernel)(HomeArgs) = sum_rows_kernel<float>;
    if (!args.wide) kernel = args.half ? sum_rows_kernel<__half> : sum_rows_kernel<__nv_bfloat16>;
    start("launching the sum of rows", kernel, args, blocks, stream);
}

void relay_sums(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    void (*kernel)(HomeArgs) = relay_sums_kernel<float>;
    if (!args.wide) {
        kernel = args.half ? relay_sums_kernel<__half> : relay_sums_kernel<__nv_bfloat16>;
    }
    start("launching the sum over a node", kernel, args, blocks, stream);
}

void sum_ranks(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    const auto kernel_of = [&]<bool kRelayed>() -> void (*)(HomeArgs) {
        if (args.wide) {
            return args.half ? sum_ranks_kernel<__half, float, kRelayed>
                             : sum_ranks_kernel<__nv_bfloat16, float, kRelayed>;
        }
        return args.half ? sum_ranks_kernel<__half, __half, kRelayed>
                         : sum_ranks_kernel<__nv_bfloat16, __nv_bfloat16, kRelayed>;
    };
    start("launching the sum over ranks",
          args.hierarchical ? kernel_of.template operator()<true>()
                            : kernel_of.template operator()<false>(),
          args, blocks, stream);
}

}  // namespace mkernel::cuda::moe
