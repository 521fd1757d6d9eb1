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

template <class Out, class In, bool kTree>
__global__ void __launch_bounds__(kThreads)
    sum_slots_kernel(const __grid_constant__ HomeArgs args) {
    sum_slots_of_call<Out, In, kTree>(args);
}

template <class In, bool kTree>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ HomeArgs args) {
    sum_rows_of_call<In, kTree>(args);
}

template <class In, bool kTree>
__global__ void __launch_bounds__(kThreads)
    relay_sums_kernel(const __grid_constant__ HomeArgs args) {
    relay_sums_of_call<In, kTree>(args);
}

template <class Out, class In, bool kTree, bool kRelayed>
__global__ void __launch_bounds__(kThreads)
    sum_ranks_kernel(const __grid_constant__ HomeArgs args) {
    sum_ranks_of_call<Out, In, kTree, kRelayed>(args);
}

using Kernel = void (*)(HomeArgs);

// Returns kernel.operator()<Out, In, kTree>() for the types of a call.
template <class Of>
Kernel kernel_for(const HomeArgs& args, Of&& kernel) {
    const auto of_results = [&]<class Out>() -> Kernel {
        if (args.wide) return kernel.template operator()<Out, float, false>();
        return args.groups > 0 ? kernel.template operator()<Out, Out, true>()
                               : kernel.template operator()<Out, Out, false>();
    };
    return args.half ? of_results.template operator()<__half>()
                     : of_results.template operator()<__nv_bfloat16>();
}

void start(const char* what, Kernel kernel, const HomeArgs& args, std::uint32_t blocks,
           cudaStream_t stream) {
    cuda::launch_small(what, kernel, blocks, kThreads, 0, stream, args);
}

}  // namespace

void load_home() {
    const auto load = []<class Out, class In, bool kTree>() {
        cuda::load_kernel(sum_rows_kernel<In, kTree>);
        cuda::load_kernel(relay_sums_kernel<In, kTree>);
        cuda::load_kernel(sum_ranks_kernel<Out, In, kTree, false>);
        cuda::load_kernel(sum_ranks_kernel<Out, In, kTree, true>);
    };
    const auto load_results = [&]<class Out>() {
        load.template operator()<Out, float, false>();
        load.template operator()<Out, Out, false>();
        load.template operator()<Out, Out, true>();
    };
    load_results.template operator()<__half>();
    load_results.template operator()<__nv_bfloat16>();
}

void send_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    start("launching the rows home", send_rows_kernel<__half>, args, blocks, stream);
}

void sum_slots(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    const auto kernel = []<class Out, class In, bool kTree>() -> Kernel {
        return sum_slots_kernel<Out, In, kTree>;
    };
    start("launching the sum over slots", kernel_for(args, kernel), args, blocks, stream);
}

void sum_rows(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    const auto kernel = []<class Out, class In, bool kTree>() -> Kernel {
        return sum_rows_kernel<In, kTree>;
    };
    start("launching the sum of rows", kernel_for(args, kernel), args, blocks, stream);
}

void relay_sums(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    const auto kernel = []<class Out, class In, bool kTree>() -> Kernel {
        return relay_sums_kernel<In, kTree>;
    };
    start("launching the sum over a node", kernel_for(args, kernel), args, blocks, stream);
}

void sum_ranks(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    const auto kernel = [&]<class Out, class In, bool kTree>() -> Kernel {
        return args.hierarchical ? sum_ranks_kernel<Out, In, kTree, true>
                                 : sum_ranks_kernel<Out, In, kTree, false>;
    };
    start("launching the sum over ranks", kernel_for(args, kernel), args, blocks, stream);
}

}  // namespace mkernel::cuda::moe
