// The kernel of mailed_tiles.cuh.
#pragma once

#include <algorithm>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/device/mailbox.cuh"
#include "backends/accelerators/cuda/device/prefetch.cuh"
#include "backends/accelerators/cuda/kernels/eight.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
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

// The carriers' side of the slices. A thread has 8 columns of every kRowsApart-th row of a slice, the same ones when
// it sends and when it takes.
template <class C, class Element>
class Carrier {
  public:
    __device__ Carrier(Shared<C>& shared, const FewRowsArgs& args)
        : shared_(shared),
          args_(args),
          waiter_(waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel)),
          epoch_(shared.epoch),
          first_((static_cast<int>(threadIdx.x) - kWarp) / kVectors),
          vector_(static_cast<int>(threadIdx.x) % kVectors) {}

    // Sends the next slice, from `row` and `column` on, as soon as it is there, and then takes the mail of the one
    // before.
    __device__ __forceinline__ void slice(int row, int column) {
        shared_.written[sent_.slot].wait(sent_.parity);
        send(row, column + vector_ * 8);
        finish();
        row_ = row;
        column_ = column + vector_ * 8;
        is_sent_ = true;
        sent_.next();
    }
    // Takes the mail of the slice that was sent last.
    __device__ __forceinline__ void finish() {
        if (!is_sent_) return;
        is_sent_ = false;
        if (going_) going_ = take();
        ptx::meet<kCarriersBarrier, kCarriers>();
        if (threadIdx.x == kWarp) shared_.drained[taken_.slot].arrive();
        taken_.next();
    }

  private:
    static constexpr int kVectors = kSliceN / 8;  // of a row of a slice
    static constexpr int kRowsApart = kCarriers / kVectors;
    static constexpr int kBatch = 6;  // rows that a thread waits for at a time

    // Returns the thread's part of a row of a slice, which is swizzled.
    __device__ uint4 words_of(int slot, int row) const {
        return *reinterpret_cast<const uint4*>(
            shared_.slices[slot] + row * kSliceN * kElementBytes + (vector_ ^ row % 8) * 16);
    }
    // Returns the rows of a slice whose first is `row` that are the product's; none where the columns are not.
    __device__ int rows_of(int row, int column) const {
        return column < args_.n ? min(kTileM, args_.m - row) : 0;
    }
    // Returns the place of a row's columns in the rows of a rank.
    __device__ std::uint64_t place(int row, int column) const {
        return (std::uint64_t{1} * row * args_.n + column) * kElementBytes;
    }
    // Returns the mail at rank `at` from rank `from`.
    __device__ char* mail(int at, int from) const {
        const Workspace& workspace = args_.workspace;
        const int slot = (from - at - 1 + workspace.world) % workspace.world;
        return workspace.mail(at, epoch_) + slot * args_.slot;
    }

    __device__ void send(int row, int column) const {
        const Workspace& workspace = args_.workspace;
        const int rows = rows_of(row, column);
#pragma unroll 1
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            char* const to = mail(peer, workspace.rank);
#pragma unroll kBatch
            for (int at = first_; at < rows; at += kRowsApart) {
                mailbox::send(to + place(row + at, column),
                              mailbox::mailable(words_of(sent_.slot, at)));
            }
        }
    }

    // Returns whether all mail has come before the limit.
    __device__ bool take() const {
        const int rows = rows_of(row_, column_);
        float bias[8] = {};
        if (args_.bias != nullptr && rows > 0) {
            add_eight<Element>(bias,
                               ptx::load_16(static_cast<const Element*>(args_.bias) + column_));
        }
#pragma unroll 1
        for (int begin = first_; begin < rows; begin += kRowsApart * kBatch) {
            float sum[kBatch][8] = {};
            if (!add_ranks(begin, rows, sum)) return false;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int at = begin + i * kRowsApart;
                if (at >= rows) break;
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[i][j] += bias[j];
                ptx::store_16(static_cast<char*>(args_.out) + place(row_ + at, column_),
                              round_eight<Element>(sum[i]));
            }
        }
        return true;
    }

    // Adds up the ranks' terms of the thread's next rows; returns whether all have come.
    __device__ __forceinline__ bool add_ranks(int begin, int rows, float (&sum)[kBatch][8]) const {
        const Workspace& workspace = args_.workspace;
#pragma unroll 1
        for (int source = 0; source < workspace.world; ++source) {
            uint4 words[kBatch] = {};
            if (source == workspace.rank) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int at = begin + i * kRowsApart;
                    if (at < rows) words[i] = words_of(taken_.slot, at);
                }
            } else {
                char* const from = mail(workspace.rank, source) + place(row_ + begin, column_);
                char* at[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    at[i] =
                        begin + i * kRowsApart < rows ? from + place(i * kRowsApart, 0) : nullptr;
                }
                const transport::Awaited what{transport::kMail, static_cast<std::uint32_t>(source),
                                              static_cast<std::uint32_t>(row_)};
                if (!mailbox::take(at, words, waiter_, what)) return false;
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) add_eight<Element>(sum[i], words[i]);
        }
        return true;
    }

    Shared<C>& shared_;
    const FewRowsArgs& args_;
    const transport::DeviceWaiter waiter_;
    const std::uint64_t epoch_;
    const int first_, vector_;
    Cursor<C::kSliceSlots> sent_, taken_;
    int row_ = 0, column_ = 0;  // of the slice that was sent last
    bool is_sent_ = false;      // and not taken yet
    bool going_ = true;
};

// Prefetches this block's share of b's first stages, which the grid before does not write.
template <class C, bool kNMajorB>
__device__ __forceinline__ void prefetch_columns(const FewRowsArgs& args, const Raster& raster,
                                                 int steps) {
    int cluster_row = 0;
    int column = 0;
    raster.at(static_cast<int>(blockIdx.x) / C::kCluster, cluster_row, column);
    column *= C::kTileN;
    const Operands<C, kNMajorB> operands{&args.b, column, args.n - column};
    for (int step = 0; step < min(steps, C::kStages); ++step) operands.prefetch(step);
}

template <class C, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kBlockThreads, 1)
    mailed_tiles(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Raster raster) {
    Shared<C>& shared = shared_memory<C>();
    open_block(shared);
    const int warp = warp_here();
    const int steps = (args.k + kTileK - 1) / kTileK;
    if (threadIdx.x == 0) prefetch_columns<C, kNMajorB>(args, raster, steps);
    ptx::wait_for_grid_before();
    if (warp == 0) {
        if (ptx::elect_one()) {
            Cursor<C::kStages> cursor;
            for_each_mailed<C>(raster, [&](int row, int column) {
                const Operands<C, kNMajorB> operands{&args.b, column, args.n - column};
                operands.load(shared, cursor, &args.a, row, args.m - row, 0, steps);
            });
            ptx::let_next_grid_start();
            prefetch_share(args.prefetch);
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
    config.gridDim = C::kCluster * std::min(std::max(blocks / C::kCluster, 1), raster.tiles());
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
        case Tiling::narrow:
            return start_mailed_tiles<Narrow, Element>(args, variant.n_major_b, blocks, stream);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // namespace mkernel::hopper
