// The kernel of grouped.cuh; one object file a variant includes it.
#pragma once

#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/kernels/moe/gather_rows.cuh"
#include "backends/accelerators/hopper/ptx/vector.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"

namespace mkernel::hopper::moe {

using Grouped = Deep;  // 128 rows a block, clusters of two
static_assert(Grouped::kCluster * kTileM == kTileRows);
static_assert(sizeof(Shared<Grouped>) + kTileM * sizeof(std::uint32_t) <= kSharedBytes);

// What a block computes of a cluster's tile.
struct Part {
    int expert, first, rows;  // rows of this block: possibly none
    int column;
    bool shares;  // the blocks have the same columns, and load them for each other
};

// Calls body(part) for each of this block's, in order. Both blocks of a cluster have as many.
template <class Body>
__device__ __forceinline__ void for_each_part(const GroupedArgs& args, Body&& body) {
    constexpr int kWidth = Grouped::kTileN;
    const int block = static_cast<int>(blockIdx.x) % 2;
    const int clusters = static_cast<int>(gridDim.x) / 2;
    const int single = (args.n + kWidth - 1) / kWidth;
    const int pairs = (single + 1) / 2;
    const Tile* tile = args.tables.tiles();
    int item = static_cast<int>(blockIdx.x) / 2;
    int before = 0;
    for (Tile now = *tile; now.expert >= 0; now = *++tile) {
        const bool shares = now.rows > kTileM;
        const int items = shares ? single : pairs;
        for (; item - before < items; item += clusters) {
            const int at = item - before;
            if (shares) {
                const int skipped = block * kTileM;
                body(Part{now.expert, now.first + skipped, min(now.rows - skipped, kTileM),
                          at * kWidth, true});
            } else {
                body(Part{now.expert, now.first, now.rows, (2 * at + block) * kWidth, false});
            }
        }
        before += items;
    }
}

// One thread: the weight's stages.
template <bool kNMajorB>
__device__ __forceinline__ void load_weights(Shared<Grouped>& shared,
                                             Cursor<Grouped::kStages>& cursor,
                                             const GroupedArgs& args, const Part& part) {
    constexpr int kShare = Grouped::kShareN;
    const int block = static_cast<int>(ptx::block_in_cluster());
    const int from = part.shares ? block * kShare : 0;
    const int end = part.shares ? from + kShare : Grouped::kTileN;
    const int steps = (args.k + kTileK - 1) / kTileK;
    for (int step = 0; step < steps; ++step, cursor.next()) {
        ptx::Mbarrier* full = &shared.full[cursor.slot];
        shared.empty[cursor.slot].wait(cursor.parity ^ 1);
        full->expect(Grouped::kBBytes);
        unsigned char* const to = shared.stages[cursor.slot] + Grouped::kABytes;
        constexpr int kBox = kNMajorB ? kSliceN : kShare;  // columns
        for (int n = from; n < end; n += kBox) {
            unsigned char* const at = to + n * kTileK * kElementBytes;
            const int x = kNMajorB ? part.column + n : step * kTileK;
            const int y = kNMajorB ? step * kTileK : part.column + n;
            if (part.shares) {
                ptx::load_box_to(3, at, &args.b, full, x, y, part.expert);
            } else {
                ptx::load_box(at, &args.b, full, x, y, part.expert);
            }
        }
    }
}

// Where results of a row go.
__device__ inline char* result_of(const GroupedArgs& args, int row, int element_bytes) {
    const std::int64_t row_bytes = std::int64_t{args.n} * element_bytes;
    if (!args.home) return args.out + row * row_bytes;
    const int own = args.tables.tokens * args.tables.top_k;
    const int place = args.tables.row_place()[row];
    const int rank = args.keeps ? args.workspace.rank : place / own;
    return args.workspace.data(rank) + place % own * row_bytes;
}

// One warp: the slices of a part, each row of which lies by itself.
class RowStorer {
  public:
    __device__ RowStorer(Shared<Grouped>& shared, const GroupedArgs& args)
        : shared_(shared), args_(args), lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void part(const Part& part) {
        for (int number = 0; number < Grouped::kSlices; ++number, cursor_.next()) {
            shared_.written[cursor_.slot].wait(cursor_.parity);
            const unsigned char* slice = shared_.slices[cursor_.slot];
            const int chunk = lane_ % 8;
            const int column = part.column + number * kSliceN + chunk * 8;
            if (column < args_.n) {
#pragma unroll 4
                for (int row = lane_ / 8; row < part.rows; row += 4) {
                    const uint4 found = *reinterpret_cast<const uint4*>(slice + row * 128 +
                                                                        (chunk ^ (row % 8)) * 16);
                    ptx::store_16(
                        result_of(args_, part.first + row, kElementBytes) + column * kElementBytes,
                        found);
                }
            }
            __syncwarp();
            if (lane_ == 0) shared_.drained[cursor_.slot].arrive();
        }
    }

  private:
    Shared<Grouped>& shared_;
    const GroupedArgs& args_;
    int lane_;
    Cursor<Grouped::kSliceSlots> cursor_;
};

// Rows of `out` that have no place are zeros. One warp of each block.
__device__ inline void zero_rest(const GroupedArgs& args) {
    const std::int64_t row_bytes = std::int64_t{args.n} * kElementBytes;
    const std::int64_t end = args.height * row_bytes;
    const std::int64_t step = std::int64_t{gridDim.x} * 512;
    for (std::int64_t at =
             args.tables.rows() * row_bytes + blockIdx.x * 512 + threadIdx.x % 32 * 16;
         at < end; at += step) {
        *reinterpret_cast<uint4*>(args.out + at) = {};
    }
}

template <class Element, bool kNMajorB, bool kGathers, bool kWide>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped(const __grid_constant__ GroupedArgs args) {
    __shared__ std::uint32_t starts[kTileM];
    Shared<Grouped>& shared = shared_memory<Grouped>();
    open_block(shared, 1 + kGatherWarps);
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const std::uint64_t epoch = args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < kWarpgroup / 32) {
        ptx::fewer_registers<88>();
        if (warp == 0) {
            if (ptx::elect_one()) {
                Cursor<Grouped::kStages> cursor;
                for_each_part(args, [&](const Part& part) {
                    load_weights<kNMajorB>(shared, cursor, args, part);
                });
            }
        } else if (warp == 1) {
            if constexpr (!kWide) {
                RowStorer storer(shared, args);
                for_each_part(args, [&](const Part& part) { storer.part(part); });
                if (args.height > 0) zero_rest(args);
                transport::fence_system();
            }
        } else {
            RowGatherer<Grouped, kGathers> gatherer(shared, args, starts,
                                                    static_cast<int>(threadIdx.x) - 64);
            for_each_part(args, [&](const Part& part) {
                gatherer.tile(waiter, epoch, part.first, part.rows);
            });
            gatherer.finish();
        }
    } else {
        ptx::more_registers<208>();
        Multiplier<Grouped, Element, kNMajorB> multiplier(shared);
        const int steps = (args.k + kTileK - 1) / kTileK;
        for_each_part(args, [&](const Part& part) {
            if (multiplier.first_row() < part.rows) {
                multiplier.multiply(steps);
            } else {
                multiplier.skip(steps);
            }
            if constexpr (kWide) {
                multiplier.write_floats(part.rows, args.n - part.column, [&](int row) {
                    char* const to = result_of(args, part.first + row, sizeof(float));
                    return reinterpret_cast<float*>(to) + part.column;
                });
            } else {
                multiplier.write();
            }
        });
        if constexpr (kWide) transport::fence_system();
    }
    close_block<Grouped>();
    if (threadIdx.x != 0 || !args.ends) return;
    if (!args.home) {
        finish_call(args.workspace, waiter, epoch);
        return;
    }
    tell_peers(args.workspace, epoch);
}

template <class Element>
cudaError_t launch_grouped(const GroupedArgs& args, GroupedVariant variant, int blocks,
                           cudaStream_t stream) {
    const auto start = [&]<bool kGathers, bool kWide>() {
        return launch_blocks<Grouped>(variant.n_major_b ? grouped<Element, true, kGathers, kWide>
                                                        : grouped<Element, false, kGathers, kWide>,
                                      args, 1 << 20, blocks, stream);
    };
    if (variant.gathers) return start.template operator()<true, false>();
    if (variant.wide) return start.template operator()<false, true>();
    return start.template operator()<false, false>();
}

}  // namespace mkernel::hopper::moe
