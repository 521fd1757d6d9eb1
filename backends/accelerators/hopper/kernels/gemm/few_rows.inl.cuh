// The kernel of few_rows.cuh.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/device/prefetch.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/exchange.cuh"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/weights.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper {

template <int kRows, class Element, class In, bool kNMajorB>
__global__ void __launch_bounds__(kFewThreads, 1)
    few_rows(const __grid_constant__ FewRowsArgs args) {
    using S = FewRows<kRows>;
    extern __shared__ __align__(1024) unsigned char memory[];
    S& shared = *reinterpret_cast<S*>(memory);
    const int splits = static_cast<int>(ptx::blocks_of_cluster());
    const int part = static_cast<int>(ptx::block_in_cluster());
    const int clusters = static_cast<int>(gridDim.x) / splits;
    const int tiles = (args.n + kFewColumns - 1) / kFewColumns;
    const int steps = (args.k + kStepK<In> - 1) / kStepK<In>;
    const int first = steps * part / splits;
    const int end = steps * (part + 1) / splits;
    const bool multiplies = threadIdx.x < kFewMultipliers;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < S::kStages; ++stage) {
            shared.full[stage].init(1);
            shared.empty[stage].init(kFewMultipliers / 32);
        }
        ptx::publish_barriers();
    }
    __syncthreads();
    const bool loads = threadIdx.x == kFewMultipliers;
    const int begin = static_cast<int>(blockIdx.x) / splits;  // the cluster's first tile
    if (loads) prefetch_few<kRows, In, kNMajorB>(args, begin * kFewColumns, first, end);
    ptx::wait_for_grid_before();

    if (!multiplies) {
        ptx::fewer_registers<40>();
        Cursor<S::kStages> cursor;
        // Read by a warp that is idle; multipliers read it after the first barrier of the cluster.
        if (threadIdx.x == kFewMultipliers + kWarp) {
            shared.epoch = epoch_of_brief_call(args.workspace);
        }
        __syncwarp();
        for (int tile = begin; tile < tiles; tile += clusters) {
            if (loads) {
                load_few<kRows, In, kNMajorB>(shared, cursor, args, tile * kFewColumns, first, end);
                if (tile + clusters >= tiles) ptx::let_next_grid_start();
            }
            __syncwarp();
            ptx::cluster_arrive();
            // The multipliers do not wait for this warp before they have sent and taken their mail.
            if (loads && tile + clusters >= tiles) prefetch_share(args.prefetch);
            __syncwarp();
            ptx::cluster_wait();
            ptx::cluster_barrier();
            if (threadIdx.x < kFewMultipliers + kWarp) await_free_stages();
        }
        return;
    }
    ptx::more_registers<232>();
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
    Cursor<S::kStages> stage;
    for (int tile = begin; tile < tiles; tile += clusters) {
        {
            float sum[kRows / 2];
            multiply_few<kRows, In, kNMajorB>(shared, stage, group, end - first, sum);
            multipliers_barrier();  // all have read the stages
            write_few<kRows>(shared, group, args.m, sum);
        }
        ptx::cluster_barrier();  // partial sums are there
        const FewShare share(args, tile, part, splits);
        const auto exchange = [&]<bool kUnrounded>() {
            FewExchange<kRows, Element, In, kUnrounded> parts(shared, args, share);
            parts.send(splits);
            __syncwarp();
            ptx::cluster_arrive();  // and have been read
            parts.receive(waiter, tile);
            __syncwarp();
        };
        if (args.unrounded) {
            exchange.template operator()<true>();
        } else {
            exchange.template operator()<false>();
        }
        ptx::cluster_wait();
        ptx::fence_async_shared();
        free_stages();
    }
}

template <int kRows, class Element, class In>
cudaError_t start_few_rows(const FewRowsArgs& args, bool n_major, int splits, int blocks,
                           cudaStream_t stream) {
    auto kernel = few_rows<kRows, Element, In, false>;
    if constexpr (sizeof(In) > 1) {
        if (n_major) kernel = few_rows<kRows, Element, In, true>;
    } else if (n_major) {
        return cudaErrorInvalidValue;
    }
    int processors = 0;
    const cudaError_t status =
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(FewRows<kRows>), processors);
    if (status != cudaSuccess) return status;
    if (blocks <= 0 || blocks > processors) blocks = processors;
    const int tiles = (args.n + kFewColumns - 1) / kFewColumns;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    // The kernel gets ready while earlier work on the stream ends.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    const int clusters = std::min(std::max(blocks / splits, 1), tiles);
    config.gridDim = clusters * splits;
    config.blockDim = kFewThreads;
    config.dynamicSmemBytes = sizeof(FewRows<kRows>);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Element, class In>
cudaError_t launch_few_rows(const FewRowsArgs& args, bool n_major, int splits, int blocks,
                            cudaStream_t stream) {
    const auto start = [&]<int kRows>() {
        return start_few_rows<kRows, Element, In>(args, n_major, splits, blocks, stream);
    };
    switch (few_rows_height(args.m)) {
        case 16:
            return start.template operator()<16>();
        case 32:
            return start.template operator()<32>();
        case 64:
            return start.template operator()<64>();
        default:
            return start.template operator()<kMostFewRows>();
    }
}

}  // namespace mkernel::hopper
