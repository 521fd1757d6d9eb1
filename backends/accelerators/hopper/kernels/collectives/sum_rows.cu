// The kernels of sum_rows.hpp and their launches.
#include "backends/accelerators/hopper/kernels/collectives/sum_rows.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/device/mailbox.cuh"
#include "backends/accelerators/hopper/kernels/eight.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"

namespace mkernel::hopper {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kBatch = 2;  // vectors of a thread that are under way

struct Args {
    Workspace workspace;
    transport::WaitLimits limits;
    RowsOfSums sums;
    std::uint64_t slot;  // bytes of mail from one rank
};

// Returns the sum of every thread of the block's value, added up in the order of warps.
__device__ float block_sum(float mine) {
    __shared__ float of_warps[kMostThreads / 32];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) mine += __shfl_xor_sync(~0u, mine, apart);
    __syncthreads();  // the sums of the row before were read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
    return sum;
}

// One row, in vectors of 8 elements. A thread has every blockDim.x-th of them, in each step the same ones.
template <class Element>
class Row {
  public:
    __device__ Row(const RowsOfSums& sums, std::uint32_t row)
        : sums_(sums), first_(static_cast<std::uint64_t>(row) * sums.columns) {}

    __device__ static unsigned vectors(const RowsOfSums& sums) { return sums.columns / 8; }

    // The number of a vector's first element in all rows.
    __device__ std::uint64_t element(unsigned vector) const { return first_ + vector * 8; }

    __device__ uint4 load(const void* rows, unsigned vector) const {
        return ptx::load_16(static_cast<const Element*>(rows) + element(vector));
    }
    __device__ void store(void* rows, unsigned vector, const float (&values)[8]) const {
        ptx::store_16(static_cast<Element*>(rows) + element(vector), round_eight<Element>(values));
    }

    // Adds the residual.
    __device__ void add_residual(unsigned vector, float (&sum)[8]) const {
        if (sums_.norm.residual != nullptr) {
            add_eight<Element>(sum, load(sums_.norm.residual, vector));
        }
    }
    // Returns the factor of a row, from the sum of this thread's squares. Called by all threads.
    __device__ float scale(float squares) const {
        return rsqrtf(block_sum(squares) / static_cast<float>(sums_.columns) + sums_.norm.eps);
    }
    __device__ void store_normed(unsigned vector, const float (&r)[8], float scale) const {
        float weight[8] = {};
        add_eight<Element>(
            weight, ptx::load_16(static_cast<const Element*>(sums_.norm.weight) + vector * 8));
        float normed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) normed[i] = r[i] * scale * weight[i];
        store(sums_.out, vector, normed);
    }

  private:
    const RowsOfSums& sums_;
    std::uint64_t first_;
};

__device__ inline float squares_of(const float (&values)[8]) {
    float sum = 0;
#pragma unroll
    for (const float each : values) sum += each * each;
    return sum;
}

// Returns the place, in the mail area of rank `at`, of what rank `source` sends of a vector.
__device__ inline char* mail(const Args& args, int at, int source, std::uint64_t epoch,
                             std::uint64_t element) {
    return args.workspace.mail(at, epoch) + source * args.slot + element * 2;
}

template <class Element>
__device__ void send_row(const Args& args, std::uint32_t number, std::uint64_t epoch) {
    const Workspace& workspace = args.workspace;
    const Row<Element> row(args.sums, number);
    for (unsigned vector = threadIdx.x; vector < row.vectors(args.sums); vector += blockDim.x) {
        const uint4 own = mailbox::mailable(row.load(args.sums.from, vector));
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            mailbox::send(mail(args, peer, workspace.rank, epoch, row.element(vector)), own);
        }
    }
}

// Sums all ranks' values of this thread's vectors from `first` on, kBatch of them, into `sums`. Returns
// whether all arrived.
template <class Element>
__device__ bool sum_vectors(const Args& args, const transport::DeviceWaiter& waiter,
                            std::uint32_t number, std::uint64_t epoch, unsigned first,
                            float (&sums)[kBatch][8]) {
    const Workspace& workspace = args.workspace;
    const Row<Element> row(args.sums, number);
    const unsigned end = row.vectors(args.sums);
    for (int source = 0; source < workspace.world; ++source) {
        uint4 words[kBatch];
        char* at[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const unsigned vector = first + i * blockDim.x;
            at[i] = nullptr;
            if (vector >= end) continue;
            if (source == workspace.rank) {
                words[i] = row.load(args.sums.from, vector);
            } else {
                at[i] = mail(args, workspace.rank, source, epoch, row.element(vector));
            }
        }
        if (source != workspace.rank) {
            const auto peer = static_cast<std::uint32_t>(source);
            if (!mailbox::take(at, words, waiter, {transport::kMail, peer, number})) return false;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * blockDim.x < end) add_eight<Element>(sums[i], words[i]);
        }
    }
    return true;
}

template <class Element, bool kNorm>
__global__ void __launch_bounds__(kMostThreads, 1)
    sum_rows_kernel(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) float unrounded[];  // a row, where it is normalised
    ptx::wait_for_grid_before();
    const std::uint64_t epoch = args.workspace.world > 1 ? epoch_of_brief_block(args.workspace) : 0;
    const RowsOfSums& sums = args.sums;
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::comm_kernel);
    for (std::uint32_t number = blockIdx.x; number < sums.rows; number += gridDim.x) {
        send_row<Element>(args, number, epoch);
    }
    for (std::uint32_t number = blockIdx.x; number < sums.rows; number += gridDim.x) {
        const Row<Element> row(sums, number);
        const unsigned end = row.vectors(sums);
        float squares = 0;
        bool going = true;
        for (unsigned first = threadIdx.x; going && first < end; first += blockDim.x * kBatch) {
            float parts[kBatch][8] = {};
            going = sum_vectors<Element>(args, waiter, number, epoch, first, parts);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const unsigned vector = first + i * blockDim.x;
                if (!going || vector >= end) continue;
                if constexpr (kNorm) {
                    row.add_residual(vector, parts[i]);
                    squares += squares_of(parts[i]);
                    row.store(sums.norm.residual_out, vector, parts[i]);
#pragma unroll
                    for (int half = 0; half < 8; half += 4) {
                        *reinterpret_cast<float4*>(unrounded + vector * 8 + half) = {
                            parts[i][half], parts[i][half + 1], parts[i][half + 2],
                            parts[i][half + 3]};
                    }
                } else {
                    row.store(sums.out, vector, parts[i]);
                }
            }
        }
        if constexpr (kNorm) {
            if (__syncthreads_and(going) == 0) return;
            const float scale = row.scale(squares);
            for (unsigned vector = threadIdx.x; vector < end; vector += blockDim.x) {
                float r[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) r[i] = unrounded[vector * 8 + i];
                row.store_normed(vector, r, scale);
            }
        } else if (!going) {
            return;
        }
    }
}

template <class Element>
__global__ void __launch_bounds__(kMostThreads, 1)
    norm_rows_kernel(const __grid_constant__ RowsOfSums sums) {
    ptx::wait_for_grid_before();
    for (std::uint32_t number = blockIdx.x; number < sums.rows; number += gridDim.x) {
        const Row<Element> row(sums, number);
        const auto unrounded = [&](unsigned vector, float(&r)[8]) {
            add_eight<Element>(r, row.load(sums.from, vector));
            row.add_residual(vector, r);
        };
        float squares = 0;
        for (unsigned vector = threadIdx.x; vector < row.vectors(sums); vector += blockDim.x) {
            float r[8] = {};
            unrounded(vector, r);
            squares += squares_of(r);
            row.store(sums.norm.residual_out, vector, r);
        }
        const float scale = row.scale(squares);
        for (unsigned vector = threadIdx.x; vector < row.vectors(sums); vector += blockDim.x) {
            float r[8] = {};
            unrounded(vector, r);  // once more: from L2, where they are now
            row.store_normed(vector, r, scale);
        }
    }
}

std::uint64_t slot_bytes(const RowsOfSums& sums) {
    return (std::uint64_t{2} * sums.rows * sums.columns + 127) / 128 * 128;
}

void check(const RowsOfSums& sums) {
    if (sums.columns == 0 || sums.columns % 8 != 0) {
        throw std::invalid_argument("columns = " + std::to_string(sums.columns) +
                                    "; expected a multiple of 8");
    }
    const RowNorm& norm = sums.norm;
    for (const void* at : {sums.from, static_cast<const void*>(sums.out), norm.weight,
                           norm.residual, static_cast<const void*>(norm.residual_out)}) {
        if (reinterpret_cast<std::uintptr_t>(at) % 16 != 0) {
            throw std::invalid_argument("rows that are not aligned to 16 bytes");
        }
    }
    if ((norm.weight == nullptr) != (norm.residual_out == nullptr)) {
        throw std::invalid_argument("a norm has a weight and rows to write the new residual to");
    }
}

template <class Parameter>
void start(const char* what, void (*kernel)(Parameter), const Parameter& argument,
           const RowsOfSums& sums, std::uint32_t most_shared, std::uint32_t shared,
           cudaStream_t stream) {
    int processors = 0;
    cuda::check(Prepared::find(reinterpret_cast<const void*>(kernel), most_shared, processors),
                what);
    const std::uint32_t blocks = sums.blocks == 0 ? processors : sums.blocks;
    const std::uint32_t threads = (sums.columns / 8 + 31) / 32 * 32;
    cudaLaunchConfig_t config{};
    config.gridDim = std::min(blocks, sums.rows);
    config.blockDim = std::min<std::uint32_t>(threads, kMostThreads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute early{};  // it gets ready while what is before it on the stream ends
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
    cuda::check(cudaLaunchKernelEx(&config, kernel, argument), what);
}

}  // namespace

void check_sum_rows(int world, const RowsOfSums& sums) {
    const std::uint64_t needed = world * slot_bytes(sums);
    if (world > 1 && needed > kMailBytes) {
        throw std::length_error("the ranks' rows are " + std::to_string(needed) +
                                " bytes; a call by mail may have " + std::to_string(kMailBytes));
    }
    if (sums.norm.weight != nullptr && sums.columns > kMostNormedColumns) {
        throw std::length_error("rows of " + std::to_string(sums.columns) +
                                " columns; a call by mail normalises at most " +
                                std::to_string(kMostNormedColumns));
    }
}

void sum_rows(const Workspace& workspace, const transport::WaitLimits& limits,
              const RowsOfSums& sums, cudaStream_t stream) {
    check(sums);
    check_sum_rows(workspace.world, sums);
    if (sums.rows == 0) return;
    const Args args{workspace, limits, sums, slot_bytes(sums)};
    const bool norm = sums.norm.weight != nullptr;
    auto* kernel =
        norm ? &sum_rows_kernel<__nv_bfloat16, true> : &sum_rows_kernel<__nv_bfloat16, false>;
    if (sums.half) {
        kernel = norm ? &sum_rows_kernel<__half, true> : &sum_rows_kernel<__half, false>;
    }
    const std::uint32_t element = norm ? sizeof(float) : 0;
    start("launching sum_rows", kernel, args, sums, element * kMostNormedColumns,
          element * sums.columns, stream);
}

void norm_rows(const RowsOfSums& sums, cudaStream_t stream) {
    check(sums);
    if (sums.norm.weight == nullptr) throw std::invalid_argument("norm_rows without a norm");
    if (sums.rows == 0) return;
    auto* const kernel = sums.half ? &norm_rows_kernel<__half> : &norm_rows_kernel<__nv_bfloat16>;
    start("launching norm_rows", kernel, sums, sums, 0, 0, stream);
}

}  // namespace mkernel::hopper
