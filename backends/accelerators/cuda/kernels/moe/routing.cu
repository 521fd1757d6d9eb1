#include "backends/accelerators/cuda/kernels/moe/routing.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/kernels/moe/cut_tiles.cuh"
#include "backends/accelerators/cuda/kernels/moe/exchange_ids.cuh"
#include "backends/accelerators/cuda/kernels/moe/runs.cuh"
#include "backends/accelerators/cuda/ptx/tensor.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr int kBlocks = ptx::kSinceHopper ? 8 : 1;  // of the cluster, which is the grid
constexpr int kMostWarps = 32;
constexpr int kCountBytes = 96 << 10;  // of shared memory, of which some devices have 99 KB a block

__global__ void MKERNEL_CLUSTER(kBlocks) route_kernel(const __grid_constant__ RoutingArgs args) {
    extern __shared__ int counted[];  // [warps][experts], then [experts]: the first row of each
    __shared__ int on[kMaxRanks];
    const Workspace& workspace = args.workspace;
    const Tables& tables = args.tables;
    const std::uint64_t epoch = workspace.world > 1 ? workspace.control().state.epoch : 0;
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int experts = tables.experts;
    const int all_runs = kBlocks * warps;
    const int run = static_cast<int>(blockIdx.x) * warps + warp;
    const Runs runs(tables, all_runs);
    const int first_expert = workspace.rank * experts;
    int* const mine = counted + warp * experts;
    int* const first_row = counted + warps * experts;
    // Scratch: [experts][runs], then rows of each expert, then rows of each rank.
    int* const before = reinterpret_cast<int*>(workspace.data(workspace.rank) + args.counts_offset);
    int* const total = before + std::int64_t{experts} * all_runs;
    int* const rows_on = total + experts;

    if (blockIdx.x == 0 && threadIdx.x < kMaxRanks) rows_on[threadIdx.x] = 0;
    if (threadIdx.x < kMaxRanks) on[threadIdx.x] = 0;
    for (int e = lane; e < experts; e += 32) mine[e] = 0;
    push_ids(args, epoch, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
             static_cast<int>(gridDim.x * blockDim.x));
    wait_for_ids(args, epoch);

    const auto* const given =
        reinterpret_cast<const std::int32_t*>(workspace.data(workspace.rank) + args.ids_offset);
    runs.for_each(tables, run, [&](std::int64_t place, bool is_one) {
        const int id = is_one ? __ldcg(given + place) : -1;
        const bool known = id >= 0 && id < experts * workspace.world;
        if (is_one) tables.ids()[place] = known ? id : -1;
        for (int rank = 0; rank < workspace.world; ++rank) {
            const int rows = __popc(__ballot_sync(kAll, known && id / experts == rank));
            if (lane == rank && rows > 0) atomicAdd(&on[rank], rows);
        }
        const int expert = known && id / experts == workspace.rank ? id - first_expert : -1;
        const unsigned same = __match_any_sync(kAll, expert);
        if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == lane) mine[expert] += __popc(same);
        __syncwarp();
    });
    for (int e = lane; e < experts; e += 32) before[std::int64_t{e} * all_runs + run] = mine[e];
    __syncthreads();
    if (threadIdx.x < kMaxRanks && on[threadIdx.x] > 0) {
        atomicAdd(&rows_on[threadIdx.x], on[threadIdx.x]);
    }
    __threadfence();
    ptx::cluster_barrier();

    for (int e = run; e < experts; e += all_runs) {
        int* const of_expert = before + std::int64_t{e} * all_runs;
        int sum = 0;
        for (int at = lane; at < (all_runs + 31) / 32 * 32; at += 32) {
            const int value = at < all_runs ? __ldcg(of_expert + at) : 0;
            int all = 0;
            const int prefix = sum + sum_before(value, all);
            if (at < all_runs) of_expert[at] = prefix;
            sum += all;
        }
        if (lane == 0) total[e] = sum;
    }
    __threadfence();
    ptx::cluster_barrier();

    int most = 0;  // rows of the rank that has the most
    int rank_of_most = 0;
    for (int rank = 0; rank < workspace.world; ++rank) {
        const int rows = __ldcg(rows_on + rank);
        if (rows > most) {
            most = rows;
            rank_of_most = rank;
        }
    }
    const bool refused = args.capacity > 0 && most > args.capacity;
    if (warp == 0) {
        int rows = 0;
        for (int first = 0; first < experts; first += 32) {
            const int e = first + lane;
            const int count = e < experts ? __ldcg(total + e) : 0;
            int all = 0;
            const int prefix = rows + sum_before(count, all);
            if (e < experts) first_row[e] = prefix;
            rows += all;
            if (blockIdx.x == 0 && e < experts) args.counts[e] = count;
        }
        if (blockIdx.x == 0) {
            if (refused) {
                if (lane == 0) tables.tiles()[0] = {-1, 0, 0, 0};
            } else {
                write_tiles(args, total, before, runs, all_runs);
            }
            if (lane == 0) {
                tables.rows() = refused ? 0 : rows;
                tables.refused() = refused ? 1 : 0;
                tables.height() = args.capacity > 0 ? args.capacity : rows;
                tables.claimed() = 0;
                Report& report = *args.report;
                if (refused && report.refused == 0) {
                    report.rank = rank_of_most;
                    report.most = most;
                    report.capacity = args.capacity;
                    transport::fence_system();
                    report.refused = 1;
                }
                report.rows = rows;
                transport::store_release(&report.call, args.limits.call);
            }
        }
    }
    __syncthreads();

    for (int e = lane; e < experts; e += 32) {
        mine[e] = first_row[e] + __ldcg(before + std::int64_t{e} * all_runs + run);
    }
    __syncwarp();
    runs.for_each(tables, run, [&](std::int64_t place, bool is_one) {
        const int id = is_one ? tables.ids()[place] : -1;
        const int local = id - first_expert;
        const int expert = id >= 0 && local >= 0 && local < experts ? local : -1;
        const unsigned same = __match_any_sync(kAll, expert);
        int row = -1;
        if (expert >= 0 && !refused) {
            row = mine[expert] + __popc(same & ((1u << lane) - 1));
            tables.row_place()[row] = static_cast<std::int32_t>(place);
        }
        if (is_one) tables.place_row()[place] = row;
        __syncwarp();
        if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == lane) mine[expert] += __popc(same);
        __syncwarp();
    });
    ptx::cluster_barrier();  // scratch is read until here
}

int warps_of(int experts) {
    const int fit = kCountBytes / 4 / experts - 1;
    if (fit < 2) {
        throw std::length_error(std::to_string(experts) + " experts on a rank; at most " +
                                std::to_string(kCountBytes / 12));
    }
    return std::min(fit, kMostWarps);
}

}  // namespace

std::uint64_t scratch_bytes(int experts) {
    const std::uint64_t runs = kBlocks * static_cast<std::uint64_t>(warps_of(experts));
    return (runs * experts + experts + kMaxRanks) * sizeof(int);
}

void load_routing() {
    cuda::load_kernel(route_kernel);
}

void route(const RoutingArgs& args, cudaStream_t stream) {
    const int warps = warps_of(args.tables.experts);
    const int blocks = cuda::since_hopper(route_kernel) ? kBlocks : 1;
    if (blocks * warps < args.tables.world) {
        throw std::length_error(std::to_string(args.tables.experts) + " experts on each of " +
                                std::to_string(args.tables.world) + " ranks; too many to route");
    }
    const int shared = (warps + 1) * args.tables.experts * static_cast<int>(sizeof(int));
    cuda::check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kCountBytes),
                "cudaFuncSetAttribute");
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = static_cast<unsigned>(warps * 32);
    config.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config.stream = stream;
    cuda::check(cudaLaunchKernelEx(&config, route_kernel, args), "launching the routing");
}

}  // namespace mkernel::cuda::moe
