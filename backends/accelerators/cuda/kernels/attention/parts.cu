#include "backends/accelerators/cuda/kernels/attention/parts.hpp"

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/kernels/attention/crossing.hpp"
#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda::attention {

namespace {

using collectives::narrow;
using collectives::widen;

constexpr unsigned kMergeThreads = 256;
constexpr unsigned kBlocksACore = 4;  // that fit: merge_blocks_a_core of machine.json
constexpr unsigned kWarp = 32;
constexpr int kElements = 8;  // that a thread has of a row
constexpr int kVectorBytes = kElements * 2;
constexpr int kAhead = 2;  // parts whose loads are all under way before the first is used

// Runs as one warp.
__global__ void await_part_kernel(Workspace workspace, transport::WaitLimits limits,
                                  std::uint32_t source, std::uint32_t flag,
                                  transport::WordPattern which) {
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::compute_kernel);
    for (std::uint32_t item = threadIdx.x; item < which.count; item += kWarp) {
        const std::uint32_t at = which.index(item);
        if (!waiter.until(workspace.flags(workspace.rank)[flag + at],
                          workspace.control().state.epoch, {flag + at, source, at})) {
            return;
        }
    }
}

__device__ const char* row_of(const Rows& rows, std::int64_t batch, std::int64_t head,
                              std::int64_t row) {
    return static_cast<const char*>(rows.at) +
           2 * (batch * rows.batch + head * rows.head + row * rows.row);
}

template <class Element>
__device__ void add(float (&sum)[kElements], float weight, uint4 found) {
    const Element* elements = reinterpret_cast<const Element*>(&found);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] += weight * widen(elements[i]);
}

// Returns the threads of this warp that have the same row as this one: all that have it.
__device__ unsigned lanes_of_row(std::uint32_t width) {
    const unsigned threads = width / kElements;
    const unsigned first = threadIdx.x % kWarp / threads * threads;
    return (threads == kWarp ? ~0u : (1u << threads) - 1) << first;
}

// Merges one thread's elements, from `at` bytes of the row on.
template <class Element>
__device__ void merge_row(const Merge& merge, std::uint32_t batch, std::uint32_t head,
                          std::uint32_t row, std::uint32_t at) {
    const std::uint64_t above = std::uint64_t{batch} * merge.heads + head;
    const auto lse_of = [&](const Part& part) {
        return part.lse[above * (merge.rows - part.first) + row - part.first];
    };
    const auto seen = [&](const Part& part) {
        return static_cast<std::int32_t>(row) >= part.first;
    };
    const Running& running = merge.running;
    const std::uint64_t before = above * merge.rows + row;
    float* const kept = running.out + before * merge.width + at / sizeof(Element);
    uint4 ahead[kAhead];
    float lse_ahead[kAhead];
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
        const Part& part = merge.parts[p];
        if (p >= merge.count || !seen(part)) continue;
        ahead[p] = ptx::load_16(row_of(part.out, batch, head, row - part.first) + at);
        lse_ahead[p] = lse_of(part);
    }
    float top = running.read ? running.lse[before] : -INFINITY;
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
        if (p < merge.count && seen(merge.parts[p])) top = fmaxf(top, lse_ahead[p]);
    }
    for (int p = kAhead; p < merge.count; ++p) {
        if (seen(merge.parts[p])) top = fmaxf(top, lse_of(merge.parts[p]));
    }
    // Scores that are all -inf, or one that is inf: nothing can be subtracted from them.
    if (isinf(top)) top = 0.0f;
    float whole = 0.0f;
    float sum[kElements] = {};
    if (running.read) {
        whole = expf(running.lse[before] - top);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = whole * kept[i];
    }
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
        if (p >= merge.count || !seen(merge.parts[p])) continue;
        const float weight = expf(lse_ahead[p] - top);
        whole += weight;
        add<Element>(sum, weight, ahead[p]);
    }
    for (int p = kAhead; p < merge.count; ++p) {
        const Part& part = merge.parts[p];
        if (!seen(part)) continue;
        const float weight = expf(lse_of(part) - top);
        whole += weight;
        add<Element>(sum, weight,
                     ptx::load_16(row_of(part.out, batch, head, row - part.first) + at));
    }
    if (running.write) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) kept[i] = sum[i] / whole;
        __syncwarp(lanes_of_row(merge.width));  // all have read what is replaced
        if (at == 0) running.lse[before] = top + logf(whole);
        return;
    }
    uint4 result;
    Element* elements = reinterpret_cast<Element*>(&result);
#pragma unroll
    for (int i = 0; i < kElements; ++i) narrow(sum[i] / whole, elements[i]);
    *reinterpret_cast<uint4*>(const_cast<char*>(row_of(merge.out, batch, head, row)) + at) = result;
    if (at == 0) merge.lse[above * merge.lse_pitch + row] = top + logf(whole);
}

// Ends the call. Called by all threads of every block, which have done everything else of the call.
__device__ void end_call(const Workspace& workspace, const transport::WaitLimits& limits) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    const auto waiter = waiter_of(workspace, limits, transport::Waiter::compute_kernel);
    finish_call(workspace, waiter, workspace.control().state.epoch);
}

template <class Element>
__global__ __launch_bounds__(kMergeThreads, kBlocksACore) void merge_kernel(
    const __grid_constant__ Workspace workspace, transport::WaitLimits limits,
    const __grid_constant__ Merge merge, bool ends) {
    const std::uint32_t threads_a_row = merge.width / kElements;
    const std::uint32_t rows_a_block = kMergeThreads / threads_a_row;
    const std::uint32_t at = threadIdx.x % threads_a_row * kVectorBytes;
    const std::uint32_t rows = merge.rows;
    const std::uint32_t all = merge.batch * merge.heads * rows;
    for (std::uint32_t number = blockIdx.x * rows_a_block + threadIdx.x / threads_a_row;
         number < all; number += gridDim.x * rows_a_block) {
        const std::uint32_t above = number / rows;
        merge_row<Element>(merge, above / merge.heads, above % merge.heads, number % rows, at);
    }
    if (ends) end_call(workspace, limits);
}

// Sums one thread's elements, from `at` bytes of the row on.
template <class Element>
__device__ void sum_row(const Sum& sum, std::uint32_t batch, std::uint32_t head, std::uint32_t row,
                        std::uint32_t at) {
    float total[kElements] = {};
    const auto of_row = [&](const Given& given) {
        return static_cast<std::int32_t>(row) - given.first;
    };
    const auto gives = [&](const Given& given) {
        return of_row(given) >= 0 && of_row(given) < given.rows;
    };
    uint4 ahead[kAhead];
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
        const Given& given = sum.given[p];
        if (p >= sum.count || !gives(given)) continue;
        ahead[p] = ptx::load_16(row_of(given.of, batch, head, of_row(given)) + at);
    }
#pragma unroll
    for (int p = 0; p < kAhead; ++p) {
        if (p < sum.count && gives(sum.given[p])) add<Element>(total, 1.0f, ahead[p]);
    }
    for (int p = kAhead; p < sum.count; ++p) {
        const Given& given = sum.given[p];
        if (!gives(given)) continue;
        add<Element>(total, 1.0f, ptx::load_16(row_of(given.of, batch, head, of_row(given)) + at));
    }
    uint4 result;
    Element* elements = reinterpret_cast<Element*>(&result);
#pragma unroll
    for (int i = 0; i < kElements; ++i) narrow(sum.factor * total[i], elements[i]);
    *reinterpret_cast<uint4*>(const_cast<char*>(row_of(sum.out, batch, head, row)) + at) = result;
}

template <class Element>
__global__ __launch_bounds__(kMergeThreads, kBlocksACore) void sum_kernel(
    const __grid_constant__ Workspace workspace, transport::WaitLimits limits,
    const __grid_constant__ Sums sums, bool ends) {
    const std::uint32_t threads_a_row = sums.width / kElements;
    const std::uint32_t rows_a_block = kMergeThreads / threads_a_row;
    const std::uint32_t at = threadIdx.x % threads_a_row * kVectorBytes;
    for (const Sum& sum : sums.sums) {
        const std::uint32_t rows = sum.rows;
        const std::uint32_t all = sums.batch * sum.heads * rows;
        for (std::uint32_t number = blockIdx.x * rows_a_block + threadIdx.x / threads_a_row;
             number < all; number += gridDim.x * rows_a_block) {
            const std::uint32_t above = number / rows;
            sum_row<Element>(sum, above / sum.heads, above % sum.heads, number % rows, at);
        }
    }
    if (ends) end_call(workspace, limits);
}

void refuse(const std::string& what) {
    throw std::invalid_argument(what);
}

void check_parts(const char* what, std::int32_t count) {
    if (count >= 1 && count <= kMaxRanks) return;
    refuse(std::string("a ") + what + " of " + std::to_string(count) + " parts; 1 to " +
           std::to_string(kMaxRanks));
}

// The threads of a row must divide a block: 8 for 64 elements, 16 for 128.
void check_width(std::int32_t width) {
    const int threads = width / kElements;
    if (threads >= 1 && width % kElements == 0 && kMergeThreads % threads == 0) return;
    refuse("rows of " + std::to_string(width) + " elements; a power of two from " +
           std::to_string(kElements) + " to " + std::to_string(kElements * kMergeThreads));
}

void check_rows(std::int32_t batch, std::int32_t heads, std::int32_t rows) {
    const std::int64_t all = std::int64_t{batch} * heads * rows;
    if (all >= 1 && all <= (std::int64_t{1} << 30)) return;
    refuse(std::to_string(all) + " rows; 1 to 2^30");
}

void check(const Merge& merge) {
    check_parts("merge", merge.count);
    check_width(merge.width);
    check_rows(merge.batch, merge.heads, merge.rows);
    const Running& running = merge.running;
    if (!running.read && merge.parts[0].first != 0) refuse("the first part does not have all rows");
    if ((running.read || running.write) && (running.out == nullptr || running.lse == nullptr)) {
        refuse("a merge with what was found before, and no memory of it");
    }
    if (running.write && merge.width > static_cast<int>(kWarp) * kElements) {
        refuse("rows of " + std::to_string(merge.width) + " elements; a warp has " +
               std::to_string(kWarp * kElements));
    }
}

void check(const Sums& sums) {
    check_width(sums.width);
    for (const Sum& sum : sums.sums) {
        check_parts("sum", sum.count);
        check_rows(sums.batch, sum.heads, sum.rows);
        if (sum.given[0].first != 0 || sum.given[0].rows != sum.rows) {
            refuse("the first part does not have all rows");
        }
    }
}

}  // namespace

void load() {
    load_crossing();
    cuda::load_kernel(await_part_kernel);
    cuda::load_kernel(merge_kernel<__half>);
    cuda::load_kernel(merge_kernel<__nv_bfloat16>);
    cuda::load_kernel(sum_kernel<__half>);
    cuda::load_kernel(sum_kernel<__nv_bfloat16>);
}

void await_part(const Workspace& workspace, const transport::WaitLimits& limits, int source,
                std::uint32_t flag, cudaStream_t stream, const transport::WordPattern& which) {
    if (which.count < 1 || which.width < 1 || flag >= kFlags ||
        which.index(which.count - 1) >= kFlags - flag) {
        throw std::invalid_argument(std::to_string(which.count) + " flags from " +
                                    std::to_string(flag) + " on; there are " +
                                    std::to_string(kFlags));
    }
    if (source < 0 || source >= workspace.world || source == workspace.rank) {
        throw std::invalid_argument("source " + std::to_string(source) + " is no peer of rank " +
                                    std::to_string(workspace.rank));
    }
    cuda::launch_small("launching the wait for a part", await_part_kernel, 1, 32, 0, stream,
                       workspace, limits, static_cast<std::uint32_t>(source), flag, which);
}

void merge(const Workspace& workspace, const transport::WaitLimits& limits, const Merge& merge,
           std::uint32_t blocks, bool ends, cudaStream_t stream) {
    check(merge);
    const auto kernel = merge.half ? merge_kernel<__half> : merge_kernel<__nv_bfloat16>;
    cuda::launch_small("launching the merge of parts", kernel, blocks, kMergeThreads, 0, stream,
                       workspace, limits, merge, ends);
}

void sum(const Workspace& workspace, const transport::WaitLimits& limits, const Sums& sums,
         std::uint32_t blocks, bool ends, cudaStream_t stream) {
    check(sums);
    const auto kernel = sums.half ? sum_kernel<__half> : sum_kernel<__nv_bfloat16>;
    cuda::launch_small("launching the sums of gradients", kernel, blocks, kMergeThreads, 0, stream,
                       workspace, limits, sums, ends);
}

}  // namespace mkernel::cuda::attention
