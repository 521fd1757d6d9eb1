#include "backends/accelerators/hopper/kernels/moe/routing.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/ptx/tensor.cuh"
#include "backends/cuda/error.hpp"
#include "backends/cuda/small_launch.cuh"

namespace mkernel::hopper::moe {

namespace {

constexpr int kBlocks = 8;  // of the cluster, which is the grid
constexpr int kMostWarps = 32;
constexpr int kCountBytes = 192 << 10;  // of shared memory
constexpr unsigned kAll = 0xFFFFFFFFu;

// Runs of places: so many a rank, one after another.
struct Runs {
    int each, places;  // of one rank, of one run

    __device__ Runs(const Tables& tables, int runs) {
        each = runs / tables.world;
        const int own = tables.tokens * tables.top_k;
        places = ((own + each - 1) / each + 31) / 32 * 32;
    }
    // Calls body(place, is one) for 32 places at a time, all lanes alike.
    template <class Body>
    __device__ void for_each(const Tables& tables, int run, Body&& body) const {
        const int own = tables.tokens * tables.top_k;
        const int first = run % each * places;
        const int end = run < each * tables.world ? min(first + places, own) : 0;
        const std::int64_t before = std::int64_t{run / each} * own;
        for (int at = first; at < end; at += 32) {
            const int mine = at + static_cast<int>(threadIdx.x) % 32;
            body(before + mine, mine < end);
        }
    }
};

// The sum of the lanes before this one, and of all.
__device__ int sum_before(int value, int& all) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int sum = value;
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(kAll, sum, by);
        if (lane >= by) sum += other;
    }
    all = __shfl_sync(kAll, sum, 31);
    return sum - value;
}

__device__ void push_ids(const RoutingArgs& args, std::uint64_t epoch, int thread, int threads) {
    const Workspace& workspace = args.workspace;
    const int own = args.tables.tokens * args.tables.top_k;
    for (int step = 0; step < workspace.world; ++step) {
        const int other = (workspace.rank + step) % workspace.world;
        const int at = args.exchanges ? other : workspace.rank;
        if (!workspace.near(at)) continue;
        auto* const ids = reinterpret_cast<std::int32_t*>(workspace.data(at) + args.ids_offset);
        std::int32_t* const to = ids + std::int64_t{args.exchanges ? workspace.rank : other} * own;
        for (int i = thread; i < own; i += threads) to[i] = args.own_ids[i];
    }
    transport::fence_system();
    ptx::cluster_barrier();
    if (thread != 0 || !args.exchanges) return;
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        if (!workspace.near(peer)) continue;
        workspace.flags(peer)[workspace.world + workspace.rank].set(epoch);
    }
}

__device__ void wait_for_ids(const RoutingArgs& args, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    if (threadIdx.x == 0 && args.exchanges) {
        const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::compute_kernel);
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            const auto flag = static_cast<std::uint32_t>(workspace.world + peer);
            if (!waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                              {flag, static_cast<std::uint32_t>(peer), transport::kNoChunk})) {
                break;  // what lies there is checked before it is used
            }
        }
    }
    __syncthreads();
}

// Rows of an expert that come from tokens of this rank.
struct OwnRows {
    int first, end;
};
__device__ OwnRows own_rows(const RoutingArgs& args, const int* before, const Runs& runs,
                            int expert, int count, int all_runs) {
    const int* of_expert = before + std::int64_t{expert} * all_runs;
    const int next = (args.workspace.rank + 1) * runs.each;
    return {of_expert[args.workspace.rank * runs.each], next < all_runs ? of_expert[next] : count};
}

// One warp. `total`: rows of each expert; `before`: rows of runs before each.
__device__ void write_tiles(const RoutingArgs& args, const int* total, const int* before,
                            const Runs& runs, int all_runs) {
    const Tables& tables = args.tables;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Tile* const tiles = tables.tiles();
    const auto cut = [&](int at, int expert, int first, int end) {
        for (; first < end; first += kTileRows, ++at) {
            tiles[at] = {expert, first, min(kTileRows, end - first), 0};
            tables.permuted()[at].value = 0;
        }
        return at;
    };
    int written = 0;
    for (const bool early : {true, false}) {
        int seen = 0;  // whole tiles of own rows, of the experts before
        int rows_before = 0;
        for (int first = 0; first < tables.experts; first += 32) {
            const int expert = first + lane;
            const int count = expert < tables.experts ? total[expert] : 0;
            OwnRows own{0, 0};
            if (count > 0) own = own_rows(args, before, runs, expert, count, all_runs);
            int all = 0;
            const int row = rows_before + sum_before(count, all);
            rows_before += all;
            const int whole = (own.end - own.first) / kTileRows;
            const int place = seen + sum_before(whole, all);
            seen += all;
            const int mine = min(max(args.early - place, 0), whole) * kTileRows;
            // Of the first rank from its first row on, else up to its last: one rest less.
            const int from = own.first == 0 || mine == 0 ? row : row + own.end - mine;
            if (early) {
                cut(min(place, args.early), expert, from, from + mine);
                written = min(seen, args.early);
            } else {
                const int pieces = (from - row + kTileRows - 1) / kTileRows +
                                   (row + count - from - mine + kTileRows - 1) / kTileRows;
                const int at = written + sum_before(pieces, all);
                cut(cut(at, expert, row, from), expert, from + mine, row + count);
                written += all;
            }
        }
    }
    if (lane == 0) tiles[written] = {-1, 0, 0, 0};
}

__global__ void __cluster_dims__(kBlocks, 1, 1)
    route_kernel(const __grid_constant__ RoutingArgs args) {
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
    const int shared = (warps + 1) * args.tables.experts * static_cast<int>(sizeof(int));
    cuda::check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kCountBytes),
                "cudaFuncSetAttribute");
    cudaLaunchConfig_t config{};
    config.gridDim = kBlocks;
    config.blockDim = static_cast<unsigned>(warps * 32);
    config.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config.stream = stream;
    cuda::check(cudaLaunchKernelEx(&config, route_kernel, args), "launching the routing");
}

}  // namespace mkernel::hopper::moe
