#include "backends/accelerators/cuda/kernels/moe/home.hpp"

#include <cuda_runtime.h>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/moe/weighted_sum.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::moe {

namespace {

constexpr unsigned kThreads = 256;

// Calls body(row, first of 8 elements) for all of `rows` rows, over the grid.
template <class Body>
__device__ void for_each_eight(std::int64_t rows, int width, Body&& body) {
    const std::int64_t eights = width / 8;
    const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
    for (std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; at < rows * eights;
         at += step) {
        body(at / eights, static_cast<int>(at % eights) * 8);
    }
}

// Waits until the flags `first` + s of all other ranks s signal this call. Called by all threads of the
// block.
__device__ void wait_for_all(const HomeArgs& args, std::uint64_t epoch, int first) {
    const Workspace& workspace = args.workspace;
    if (threadIdx.x == 0 && args.waits) {
        const auto waiter = waiter_of(workspace, args.limits, transport::Waiter::compute_kernel);
        for (int step = 1; step < workspace.world; ++step) {
            const auto source =
                static_cast<std::uint32_t>((workspace.rank + step) % workspace.world);
            const bool far = first > 0 && !workspace.near(static_cast<int>(source));
            const std::uint32_t flag =
                far ? 2 * first + (source + 1) * args.pieces - 1 : first + source;
            if (!waiter.until(workspace.flags(workspace.rank)[flag], epoch,
                              {flag, source, transport::kNoChunk})) {
                break;
            }
        }
    }
    __syncthreads();
}

__device__ std::uint64_t epoch_of(const HomeArgs& args) {
    return args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
}

// Signals this rank's flag, as the last step of all threads of the block. Ranks of other nodes are signalled
// by what is put to them.
__device__ void tell(const HomeArgs& args, std::uint64_t epoch) {
    transport::fence_system();
    __syncthreads();
    if (threadIdx.x == 0 && args.waits) tell_peers(args.workspace, epoch);
}
__device__ void finish(const HomeArgs& args, std::uint64_t epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    finish_call(args.workspace,
                waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel), epoch);
}

__device__ char* home_of(const HomeArgs& args, int rank) {
    return args.workspace.data(args.waits ? rank : args.workspace.rank) + args.rows_offset;
}

// Returns where sums of tokens of `source` start: in its workspace, those of this rank; for another node's
// rank, in the outbox.
__device__ char* sums_for(const HomeArgs& args, int source, int element_bytes) {
    const std::int64_t each = std::int64_t{args.tables.tokens} * args.width * element_bytes;
    const Workspace& workspace = args.workspace;
    if (!args.waits || workspace.near(source)) {
        return home_of(args, source) + workspace.rank * each;
    }
    return workspace.network.area + args.outbox_offset + source * each;
}

__device__ void refuse(Sums& sums) {
#pragma unroll
    for (float& each : sums.of) each = __int_as_float(0x7FC00000);
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    send_rows_kernel(const __grid_constant__ HomeArgs args) {
    const std::uint64_t epoch = epoch_of(args);
    const int own = args.tables.tokens * args.tables.top_k;
    for_each_eight(args.tables.rows(), args.width, [&](std::int64_t row, int column) {
        const int place = args.tables.row_place()[row];
        const uint4 found = ptx::load_16(args.y + (row * args.width + column) * 2);
        ptx::store_16(
            home_of(args, place / own) + (std::int64_t{place % own} * args.width + column) * 2,
            found);
    });
    tell(args, epoch);
}

template <class Out, class In>
__global__ void __launch_bounds__(kThreads)
    sum_slots_kernel(const __grid_constant__ HomeArgs args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_all(args, epoch, args.workspace.world);
    const Tables& tables = args.tables;
    const char* const home = args.workspace.data(args.workspace.rank) + args.rows_offset;
    const std::int64_t before = std::int64_t{args.workspace.rank} * tables.tokens * tables.top_k;
    const bool refused = tables.refused() != 0;
    for_each_eight(tables.tokens, args.width, [&](std::int64_t token, int column) {
        Sums sums;
        for (int slot = 0; slot < tables.top_k; ++slot) {
            const std::int64_t place = token * tables.top_k + slot;
            if (tables.ids()[before + place] < 0) continue;
            sums.add<In>(args.weights[place], home + (place * args.width + column) * sizeof(In));
        }
        if (refused) refuse(sums);
        sums.store<Out>(args.out + (token * args.width + column) * sizeof(Out));
    });
    finish(args, epoch);
}

template <class In>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ HomeArgs args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_all(args, epoch, 0);
    const Tables& tables = args.tables;
    const auto* const theirs = reinterpret_cast<const float*>(
        args.workspace.data(args.workspace.rank) + args.weights_offset);
    const std::int64_t own = std::int64_t{tables.tokens} * tables.top_k;
    const std::int64_t some = std::int64_t{tables.world} * (args.end - args.first);
    constexpr int kLoads = sizeof(In) == 2 ? 4 : 2;  // under way, of a token's results
    // The tokens of all ranks take turns, so that the link is used from the first to the last.
    for_each_eight(some, args.width, [&](std::int64_t turn, int column) {
        const auto source = static_cast<int>(turn % tables.world);
        const std::int64_t token = args.first + turn / tables.world;
        const std::int64_t number = source * std::int64_t{tables.tokens} + token;
        // In a view that exchanges nothing the own weights stand for those of all ranks.
        const float* const weights =
            source == args.workspace.rank || !args.waits ? args.weights : theirs + source * own;
        const std::int32_t* const rows = tables.place_row() + number * tables.top_k;
        Sums sums;
        bool any = false;
        for (int slot = 0; slot < tables.top_k; slot += kLoads) {
            int row[kLoads];
            Eight<In> found[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                row[i] = slot + i < tables.top_k ? rows[slot + i] : -1;
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (row[i] < 0) continue;
                found[i].load(args.y + (std::int64_t{row[i]} * args.width + column) * sizeof(In));
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (row[i] < 0) continue;
                any = true;
                sums.add(weights[token * tables.top_k + slot + i], found[i]);
            }
        }
        if (!any) return;
        char* const to = sums_for(args, source, sizeof(In));
        sums.store<In>(to + (token * args.width + column) * sizeof(In));
    });
    if (args.end == tables.tokens) tell(args, epoch);
}

template <class Out, class In>
__global__ void __launch_bounds__(kThreads)
    sum_ranks_kernel(const __grid_constant__ HomeArgs args) {
    const std::uint64_t epoch = epoch_of(args);
    wait_for_all(args, epoch, args.workspace.world);
    const Tables& tables = args.tables;
    const char* const home = args.workspace.data(args.workspace.rank) + args.rows_offset;
    const std::int32_t* const ids =
        tables.ids() + std::int64_t{args.workspace.rank} * tables.tokens * tables.top_k;
    const bool refused = tables.refused() != 0;
    for_each_eight(tables.tokens, args.width, [&](std::int64_t token, int column) {
        unsigned ranks = 0;
        for (int slot = 0; slot < tables.top_k; ++slot) {
            const int id = ids[token * tables.top_k + slot];
            if (id >= 0) ranks |= 1u << id / tables.experts;
        }
        Sums sums;
        for (int rank = 0; rank < tables.world; ++rank) {
            if ((ranks >> rank & 1) == 0) continue;
            const std::int64_t at = std::int64_t{rank} * tables.tokens + token;
            sums.add<In>(1.0f, home + (at * args.width + column) * sizeof(In));
        }
        if (refused) refuse(sums);
        sums.store<Out>(args.out + (token * args.width + column) * sizeof(Out));
    });
    finish(args, epoch);
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
    load(sum_ranks_kernel<__half, float>, sum_ranks_kernel<__nv_bfloat16, float>,
         sum_ranks_kernel<__half, __half>, sum_ranks_kernel<__nv_bfloat16, __nv_bfloat16>);
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

void sum_ranks(const HomeArgs& args, std::uint32_t blocks, cudaStream_t stream) {
    void (*kernel)(HomeArgs) = nullptr;
    if (args.wide) {
        kernel =
            args.half ? sum_ranks_kernel<__half, float> : sum_ranks_kernel<__nv_bfloat16, float>;
    } else {
        kernel = args.half ? sum_ranks_kernel<__half, __half>
                           : sum_ranks_kernel<__nv_bfloat16, __nv_bfloat16>;
    }
    start("launching the sum over ranks", kernel, args, blocks, stream);
}

}  // namespace mkernel::cuda::moe
