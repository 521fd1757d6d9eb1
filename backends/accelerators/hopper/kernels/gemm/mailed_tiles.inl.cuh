// The kernel of mailed_tiles.cuh.
#pragma once

#include <algorithm>

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/device/mailbox.cuh"
#include "backends/accelerators/hopper/kernels/eight.cuh"
#include "backends/accelerators/hopper/kernels/gemm/mailed_tiles.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"

namespace mkernel::hopper {

static_assert(kMailedRows == kTileM);
inline constexpr int kCarriers = 3 * kWarp;  // threads
inline constexpr int kCarriersBarrier = 2;   // 1 is the multipliers'

// Calls body(row, column), the first ones of a tile, for each of this block's tiles, in order.
template <class C, class Body>
__device__ __forceinline__ void for_each_mailed(const Raster& raster, Body&& body) {
    const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
    const int block = static_cast<int>(blockIdx.x) % C::kCluster;
    for (int index = static_cast<int>(blockIdx.x) / C::kCluster; index < raster.tiles();
         index += clusters) {
        int cluster_row = 0;
        int column = 0;
        raster.at(index, cluster_row, column);
        body((cluster_row * C::kCluster + block) * kTileM, column * C::kTileN);
    }
}

// The carriers' side of the slices. A thread has every kCarriers-th vector of 8 columns, the same ones when it sends
// and when it takes.
template <class C, class Element>
class Carrier {
  public:
    __device__ Carrier(Shared<C>& shared, const FewRowsArgs& args)
        : shared_(shared),
          args_(args),
          waiter_(waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel)),
          epoch_(shared.epoch),
          thread_(static_cast<int>(threadIdx.x) - kWarp) {}

    // Sends the next slice, from `row` and `column` on, as soon as it is there, and then takes the mail of the one
    // before.
    __device__ __forceinline__ void slice(int row, int column) {
        shared_.written[sent_.slot].wait(sent_.parity);
        send(row, column);
        finish();
        row_ = row;
        column_ = column;
        is_sent_ = true;
        sent_.next();
    }
    // Takes the mail of the slice that was sent last.
    __device__ __forceinline__ void finish() {
        if (!is_sent_) return;
        is_sent_ = false;
        if (going_) going_ = take();
        ptx::meet<kCarriersBarrier, kCarriers>();
        if (thread_ == 0) shared_.drained[taken_.slot].arrive();
        taken_.next();
    }

  private:
    static constexpr int kChunks = kSliceN / 8;  // vectors of a row of a slice
    static constexpr int kVectors = kTileM * kChunks;
    static constexpr int kBatch = 4;  // vectors that are waited for at a time

    // Returns a vector of a slice, which is swizzled.
    __device__ uint4 vector(int slot, int number) const {
        const int row = number / kChunks;
        return *reinterpret_cast<const uint4*>(shared_.slices[slot] + row * kSliceN * kElementBytes +
                                               (number % kChunks ^ row % 8) * 16);
    }
    // Returns whether the vector of a slice at (row, column) is one of the product.
    __device__ bool is_there(int row, int column, int number) const {
        return number < kVectors && row + number / kChunks < args_.m &&
               column + number % kChunks * 8 < args_.n;
    }
    // Returns the rank whose output a row is in, where only one has it.
    __device__ int owner(int row) const { return row / args_.rows; }
    __device__ bool scatters() const {
        return args_.exchange == FewRowsExchange::reduce_scatter && args_.workspace.world > 1;
    }
    // Returns the place of a vector in rows that begin with `first`.
    __device__ std::uint64_t place(int row, int column, int number, int first) const {
        return (std::uint64_t{1} * (row + number / kChunks - first) * args_.n + column +
                number % kChunks * 8) *
               kElementBytes;
    }

    __device__ void send(int row, int column) const {
        const Workspace& workspace = args_.workspace;
        if (workspace.world == 1) return;
#pragma unroll 4
        for (int number = thread_; number < kVectors; number += kCarriers) {
            if (!is_there(row, column, number)) continue;
            const uint4 words = mailbox::mailable(vector(sent_.slot, number));
            const auto send_to = [&](int peer, int first) {
                mailbox::send(workspace.mail(peer, epoch_) + workspace.rank * args_.slot +
                                  place(row, column, number, first),
                              words);
            };
            if (scatters()) {
                const int to = owner(row + number / kChunks);
                if (to != workspace.rank) send_to(to, to * args_.rows);
                continue;
            }
#pragma unroll 1
            for (int step = 1; step < workspace.world; ++step) {
                send_to((workspace.rank + step) % workspace.world, 0);
            }
        }
    }

    // Returns whether all mail has come before the limit.
    __device__ bool take() const {
        const Workspace& workspace = args_.workspace;
        const int first_row = scatters() ? workspace.rank * args_.rows : 0;
#pragma unroll 1
        for (int begin = thread_; begin < kVectors; begin += kCarriers * kBatch) {
            bool is_own[kBatch];
            float sum[kBatch][8] = {};
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int number = begin + i * kCarriers;
                is_own[i] =
                    is_there(row_, column_, number) &&
                    (!scatters() || owner(row_ + number / kChunks) == workspace.rank);
            }
#pragma unroll 1
            for (int source = 0; source < workspace.world; ++source) {
                uint4 words[kBatch];
                if (source == workspace.rank) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        if (is_own[i]) words[i] = vector(taken_.slot, begin + i * kCarriers);
                    }
                } else {
                    char* const mail =
                        workspace.mail(workspace.rank, epoch_) + source * args_.slot;
                    char* at[kBatch];
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        const int number = begin + i * kCarriers;
                        at[i] = is_own[i] ? mail + place(row_, column_, number, first_row) : nullptr;
                    }
                    const transport::Awaited what{transport::kMail,
                                                  static_cast<std::uint32_t>(source),
                                                  static_cast<std::uint32_t>(row_)};
                    if (!mailbox::take(at, words, waiter_, what)) return false;
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (is_own[i]) add_eight<Element>(sum[i], words[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (is_own[i]) write(begin + i * kCarriers, first_row, sum[i]);
            }
        }
        return true;
    }

    __device__ void write(int number, int first_row, float (&sum)[8]) const {
        if (args_.bias != nullptr) {
            const auto* const bias = static_cast<const Element*>(args_.bias) + column_;
            add_eight<Element>(sum,
                               *reinterpret_cast<const uint4*>(bias + number % kChunks * 8));
        }
        ptx::store_16(static_cast<char*>(args_.out) + place(row_, column_, number, first_row),
                      round_eight<Element>(sum));
    }

    Shared<C>& shared_;
    const FewRowsArgs& args_;
    const transport::DeviceWaiter waiter_;
    const std::uint64_t epoch_;
    const int thread_;
    Cursor<C::kSliceSlots> sent_, taken_;
    int row_ = 0, column_ = 0;  // of the slice that was sent last
    bool is_sent_ = false;      // and not taken yet
    bool going_ = true;
};

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    mailed_tiles(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Raster raster) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int steps = (args.k + kTileK - 1) / kTileK;
    ptx::wait_for_grid_before();
    if (warp == 0) {
        if (ptx::elect_one()) {
            Cursor<C::kStages> cursor;
            for_each_mailed<C>(raster, [&](int row, int column) {
                Operands<C, kNMajorB>{&args.b, column}.load(shared, cursor, &args.a, row, 0, steps);
            });
            ptx::let_next_grid_start();
        }
    } else if (warp < kWarpgroup / kWarp) {
        if (threadIdx.x == kWarp) shared.epoch = epoch_of_brief_call(args.workspace);
        ptx::meet<kCarriersBarrier, kCarriers>();
        Carrier<C, Element> carrier(shared, args);
        for_each_mailed<C>(raster, [&](int row, int column) {
            for (int slice = 0; slice < C::kSlices; ++slice) {
                carrier.slice(row, column + slice * kSliceN);
            }
        });
        carrier.finish();
    } else {
        Multiplier<C, Element, kNMajorB> multiplier(shared);
        for_each_mailed<C>(raster, [&](int, int) {
            multiplier.multiply(steps);
            multiplier.write();
        });
    }
    close_block<C>();
}

template <class C, class Element>
cudaError_t start_mailed_tiles(const FewRowsArgs& args, bool n_major, int blocks,
                               cudaStream_t stream) {
    auto* const kernel =
        n_major ? &mailed_tiles<C, Element, true> : &mailed_tiles<C, Element, false>;
    int processors = 0;
    const cudaError_t status =
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(Shared<C>), processors);
    if (status != cudaSuccess) return status;
    if (blocks <= 0 || blocks > processors) blocks = processors;
    const int rows = (args.m + C::kCluster * kTileM - 1) / (C::kCluster * kTileM);
    const Raster raster{rows, (args.n + C::kTileN - 1) / C::kTileN, rows};
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {C::kCluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim =
        C::kCluster * std::min(std::max(blocks / C::kCluster, 1), raster.tiles());
    config.blockDim = kBlockThreads;
    config.dynamicSmemBytes = sizeof(Shared<C>);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, args, raster);
}

template <class Element>
cudaError_t launch_mailed_tiles(const FewRowsArgs& args, GemmVariant variant, int blocks,
                                cudaStream_t stream) {
    switch (variant.tiling) {
        case Tiling::wide:
            return start_mailed_tiles<Wide, Element>(args, variant.n_major_b, blocks, stream);
        case Tiling::medium:
            return start_mailed_tiles<Medium, Element>(args, variant.n_major_b, blocks, stream);
        case Tiling::narrow:
            return start_mailed_tiles<Narrow, Element>(args, variant.n_major_b, blocks, stream);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // namespace mkernel::hopper
