// The kernel of few_rows.cuh.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/device/mailbox.cuh"
#include "backends/accelerators/hopper/kernels/eight.cuh"
#include "backends/accelerators/hopper/kernels/few_rows.cuh"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/ptx/wgmma.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

// Two warpgroups multiply, 64 columns of the tile each; a thread of the third loads.
inline constexpr int kFewMultipliers = 2 * kWarpgroup;
inline constexpr int kFewThreads = kFewMultipliers + kWarpgroup;

static_assert(kFewDepth == kTileK);

template <int kRows>
struct FewRows {
    static constexpr int kWeightBytes = kFewColumns * kTileK * kElementBytes;
    static constexpr int kStageBytes = kWeightBytes + kRows * kTileK * kElementBytes;
    static constexpr int kStages = (kSharedBytes - 1024) / kStageBytes;
    // Floats from one row of partial sums to the next: lanes that write rows and columns of a block of
    // accumulators meet no bank twice.
    static constexpr int kPitch = kFewColumns + 4;

    alignas(1024) unsigned char stages[kStages][kStageBytes];
    ptx::Mbarrier full[kStages];
    ptx::Mbarrier empty[kStages];
    std::uint64_t epoch;
    BlockTrace<static_cast<int>(FewRowsMark::count)> trace;

    __device__ void mark(FewRowsMark which) { trace.mark(static_cast<int>(which)); }

    // Partial sums [kRows, kPitch]: where the stages were, once all of them were multiplied.
    __device__ float* sums() { return reinterpret_cast<float*>(stages); }
    static_assert(kRows * kPitch * sizeof(float) <= kStages * kStageBytes);
};

// Columns of a tile, and the part of it that this block adds up: vectors of 8 columns, row by row.
struct FewShare {
    int column;   // the tile's first
    int vectors;  // a row of it
    int first, end;

    __device__ FewShare(const FewRowsArgs& args, int tile, int part, int splits)
        : column(tile * kFewColumns), vectors(min(kFewColumns, args.n - column) / 8) {
        const int all = args.m * vectors;
        first = all * part / splits;
        end = all * (part + 1) / splits;
    }
};

// The multipliers' threads only.
__device__ __forceinline__ void multipliers_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(kFewMultipliers) : "memory");
}

template <int kRows, bool kNMajorB>
__device__ __forceinline__ void load_few(FewRows<kRows>& shared,
                                         Cursor<FewRows<kRows>::kStages>& cursor,
                                         const FewRowsArgs& args, int column, int first, int end) {
    using S = FewRows<kRows>;
    for (int step = first; step < end; ++step, cursor.next()) {
        ptx::Mbarrier* full = &shared.full[cursor.slot];
        unsigned char* stage = shared.stages[cursor.slot];
        shared.empty[cursor.slot].wait(cursor.parity ^ 1);
        full->expect(S::kStageBytes);
        if constexpr (kNMajorB) {
            ptx::load_box(stage, &args.b, full, column, step * kTileK);
            ptx::load_box(stage + S::kWeightBytes / 2, &args.b, full, column + 64, step * kTileK);
        } else {
            ptx::load_box(stage, &args.b, full, step * kTileK, column);
        }
        ptx::load_box(stage + S::kWeightBytes, &args.a, full, step * kTileK, 0);
    }
}

// The weights of the first stages.
template <int kRows, bool kNMajorB>
__device__ __forceinline__ void prefetch_few(const FewRowsArgs& args, int column, int first,
                                             int end) {
    for (int step = first; step < min(end, first + FewRows<kRows>::kStages); ++step) {
        if constexpr (kNMajorB) {
            ptx::prefetch_box(&args.b, column, step * kTileK);
            ptx::prefetch_box(&args.b, column + 64, step * kTileK);
        } else {
            ptx::prefetch_box(&args.b, step * kTileK, column);
        }
    }
}

// This warpgroup's 64 columns of b^T times a^T, over `steps` stages.
template <int kRows, class Element, bool kNMajorB>
__device__ __forceinline__ void multiply_few(FewRows<kRows>& shared,
                                             Cursor<FewRows<kRows>::kStages>& stage, int group,
                                             int steps, float (&sum)[kRows / 2]) {
    using S = FewRows<kRows>;
    constexpr int kAtomBytes = 1024;
#pragma unroll
    for (float& each : sum) each = 0;
    const bool releases = threadIdx.x % 32 == 0;
    Cursor<S::kStages> before = stage;
    for (int step = 0; step < steps; ++step) {
        shared.full[stage.slot].wait(stage.parity);
        if (kTraced && step == 0 && threadIdx.x == 0) shared.mark(FewRowsMark::come);
        const unsigned char* at = shared.stages[stage.slot];
        std::uint64_t weights = ptx::descriptor(at + group * S::kWeightBytes / 2, 0, kAtomBytes);
        std::uint64_t rows = ptx::descriptor(at + S::kWeightBytes, 0, kAtomBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileK; k += 16) {
            ptx::wgmma<Element, false, kNMajorB>(sum, weights, rows, true);
            weights += (kNMajorB ? 16 * kTileK * kElementBytes : 16 * kElementBytes) >> 4;
            rows += 16 * kElementBytes >> 4;
        }
        ptx::wgmma_commit();
        if (step > 0) {
            ptx::wgmma_wait<1>();
            if (releases) shared.empty[before.slot].arrive();
        }
        before = stage;
        stage.next();
    }
    ptx::wgmma_wait<0>();
    if (steps > 0 && releases) shared.empty[before.slot].arrive();
}

// The accumulators into the block's partial sums, the first `m` rows of them and perhaps a few more.
template <int kRows>
__device__ __forceinline__ void write_few(FewRows<kRows>& shared, int group, int m,
                                          const float (&sum)[kRows / 2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    float* const at =
        shared.sums() + lane % 4 * 2 * FewRows<kRows>::kPitch + group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int block = 0; block < kRows / 8; ++block) {
        if (block * 8 >= m) break;
#pragma unroll
        for (int which = 0; which < 4; ++which) {
            at[(block * 8 + which % 2) * FewRows<kRows>::kPitch + which / 2 * 8] =
                sum[block * 4 + which];
        }
    }
}

// The multipliers are done with their partial sums, and the loader's warp hears it: not __syncthreads,
// which all threads must come to at one place of the program.
__device__ __forceinline__ void free_stages() {
    asm volatile("bar.arrive 2, %0;" ::"n"(kFewMultipliers + kWarp) : "memory");
}
__device__ __forceinline__ void await_free_stages() {
    asm volatile("bar.sync 2, %0;" ::"n"(kFewMultipliers + kWarp) : "memory");
}

// 8 sums as they travel: rounded, 16 bytes; or not, 32.
template <class Element, bool kUnrounded>
struct Travelling {
    static constexpr int kWords = kUnrounded ? 2 : 1;  // of 16 bytes
    uint4 words[kWords];

    __device__ void pack(const float (&sum)[8]) {
        if constexpr (kUnrounded) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                words[i] = {__float_as_uint(sum[4 * i]), __float_as_uint(sum[4 * i + 1]),
                            __float_as_uint(sum[4 * i + 2]), __float_as_uint(sum[4 * i + 3])};
            }
        } else {
            words[0] = round_eight<Element>(sum);
        }
#pragma unroll
        for (uint4& each : words) each = mailbox::mailable(each);
    }
    // Adds to `sum`.
    __device__ void add_to(float (&sum)[8]) const {
        if constexpr (kUnrounded) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sum[4 * i] += __uint_as_float(words[i].x);
                sum[4 * i + 1] += __uint_as_float(words[i].y);
                sum[4 * i + 2] += __uint_as_float(words[i].z);
                sum[4 * i + 3] += __uint_as_float(words[i].w);
            }
        } else {
            add_eight<Element>(sum, words[0]);
        }
    }
};

// The block's share of a tile, from the cluster's partial sums on. All the multipliers' threads; each has
// vectors of its own in every step, so what it writes in one it may read in the next.
template <int kRows, class Element, bool kUnrounded>
class FewExchange {
  public:
    using Vector = Travelling<Element, kUnrounded>;

    __device__ FewExchange(FewRows<kRows>& shared, const FewRowsArgs& args, const FewShare& share)
        : shared_(shared), args_(args), share_(share) {}

    // Adds up what the blocks of the cluster have, and sends it; own sums stay where partial ones were.
    __device__ void send(int splits) {
        const Workspace& workspace = args_.workspace;
        const std::uint64_t epoch = shared_.epoch;
        for (int vector = share_.first + static_cast<int>(threadIdx.x); vector < share_.end;
             vector += kFewMultipliers) {
            float* const at = partial(vector);
            float sum[8] = {};
            for (int first = 0; first < splits; first += kBatch) {
                float4 parts[kBatch][2];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (first + i >= splits) continue;
                    parts[i][0] = ptx::load_of_block(at, first + i);
                    parts[i][1] = ptx::load_of_block(at + 4, first + i);
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (first + i >= splits) continue;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sum[4 * half] += parts[i][half].x;
                        sum[4 * half + 1] += parts[i][half].y;
                        sum[4 * half + 2] += parts[i][half].z;
                        sum[4 * half + 3] += parts[i][half].w;
                    }
                }
            }
            Vector own;
            own.pack(sum);
            auto* const kept = reinterpret_cast<uint4*>(at);
#pragma unroll
            for (int i = 0; i < Vector::kWords; ++i) kept[i] = own.words[i];
            for (int step = 1; step < workspace.world; ++step) {
                const int peer = (workspace.rank + step) % workspace.world;
                if (!is_of(peer, vector)) continue;
                char* const to = mail(peer, workspace.rank, epoch, vector);
#pragma unroll
                for (int i = 0; i < Vector::kWords; ++i) mailbox::send(to + 16 * i, own.words[i]);
            }
        }
    }

    // Adds up what the ranks have, into `out`.
    __device__ void receive(const transport::DeviceWaiter& waiter, int tile) {
        const Workspace& workspace = args_.workspace;
        const std::uint64_t epoch = shared_.epoch;
        for (int first = share_.first + static_cast<int>(threadIdx.x); first < share_.end;
             first += kFewMultipliers * kBatch) {
            float sum[kBatch][8] = {};
            for (int source = 0; source < workspace.world; ++source) {
                Vector vectors[kBatch];
                if (source == workspace.rank) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        const int vector = first + i * kFewMultipliers;
                        if (!is_own(vector)) continue;
                        const auto* const kept = reinterpret_cast<const uint4*>(partial(vector));
#pragma unroll
                        for (int word = 0; word < Vector::kWords; ++word) {
                            vectors[i].words[word] = kept[word];
                        }
                    }
                } else if (!take(waiter, source, tile, epoch, first, vectors)) {
                    return;
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (is_own(first + i * kFewMultipliers)) vectors[i].add_to(sum[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int vector = first + i * kFewMultipliers;
                if (is_own(vector)) write(vector, sum[i]);
            }
        }
    }

  private:
    static constexpr int kBatch = kUnrounded ? 2 : 4;  // vectors of a thread that are under way

    __device__ int row_of(int vector) const { return vector / share_.vectors; }
    // The row in that rank's `out`, if it has it there and adds it up: one of [0, rows).
    __device__ int row_in_out(int rank, int vector) const {
        const bool scatters = args_.exchange == FewRowsExchange::reduce_scatter;
        return row_of(vector) - (scatters ? rank * args_.rows : 0);
    }
    __device__ bool is_of(int rank, int vector) const {
        return static_cast<unsigned>(row_in_out(rank, vector)) < static_cast<unsigned>(args_.rows);
    }
    __device__ bool is_own(int vector) const {
        return vector < share_.end && is_of(args_.workspace.rank, vector);
    }
    __device__ int column_of(int vector) const { return vector % share_.vectors * 8; }

    __device__ float* partial(int vector) const {
        return shared_.sums() + row_of(vector) * FewRows<kRows>::kPitch + column_of(vector);
    }
    // Of that rank's `out`.
    __device__ std::uint64_t element(int rank, int vector) const {
        return static_cast<std::uint64_t>(row_in_out(rank, vector)) * args_.n + share_.column +
               column_of(vector);
    }
    __device__ char* mail(int at, int source, std::uint64_t epoch, int vector) const {
        return args_.workspace.mail(at, epoch) + source * args_.slot +
               element(at, vector) * (kUnrounded ? sizeof(float) : kElementBytes);
    }

    __device__ bool take(const transport::DeviceWaiter& waiter, int source, int tile,
                         std::uint64_t epoch, int first, Vector (&vectors)[kBatch]) const {
        char* at[kBatch * Vector::kWords];
        uint4 words[kBatch * Vector::kWords];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int vector = first + i * kFewMultipliers;
            char* const place =
                is_own(vector) ? mail(args_.workspace.rank, source, epoch, vector) : nullptr;
#pragma unroll
            for (int word = 0; word < Vector::kWords; ++word) {
                at[i * Vector::kWords + word] = place == nullptr ? nullptr : place + 16 * word;
            }
        }
        const auto peer = static_cast<std::uint32_t>(source);
        const auto number = static_cast<std::uint32_t>(tile);
        if (!mailbox::take(at, words, waiter, {transport::kMail, peer, number})) return false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
            for (int word = 0; word < Vector::kWords; ++word) {
                vectors[i].words[word] = words[i * Vector::kWords + word];
            }
        }
        return true;
    }

    __device__ void write(int vector, const float (&sum)[8]) const {
        float whole[8];
        const auto* const bias = static_cast<const Element*>(args_.bias);
#pragma unroll
        for (int i = 0; i < 8; ++i) whole[i] = sum[i];
        if (bias != nullptr) {
            add_eight<Element>(whole, ptx::load_16(bias + share_.column + column_of(vector)));
        }
        ptx::store_16(static_cast<Element*>(args_.out) + element(args_.workspace.rank, vector),
                      round_eight<Element>(whole));
    }

    FewRows<kRows>& shared_;
    const FewRowsArgs& args_;
    const FewShare share_;
};

template <int kRows, class Element, bool kNMajorB>
__global__ void __launch_bounds__(kFewThreads, 1)
    few_rows(const __grid_constant__ FewRowsArgs args) {
    using S = FewRows<kRows>;
    extern __shared__ __align__(1024) unsigned char memory[];
    S& shared = *reinterpret_cast<S*>(memory);
    const int splits = static_cast<int>(ptx::blocks_of_cluster());
    const int part = static_cast<int>(ptx::block_in_cluster());
    const int clusters = static_cast<int>(gridDim.x) / splits;
    const int tiles = (args.n + kFewColumns - 1) / kFewColumns;
    const int steps = (args.k + kTileK - 1) / kTileK;
    const int first = steps * part / splits;
    const int end = steps * (part + 1) / splits;
    const bool multiplies = threadIdx.x < kFewMultipliers;

    if (threadIdx.x == 0) {
        shared.mark(FewRowsMark::begun);
        for (int stage = 0; stage < S::kStages; ++stage) {
            shared.full[stage].init(1);
            shared.empty[stage].init(kFewMultipliers / 32);
        }
        ptx::publish_barriers();
    }
    __syncthreads();
    const bool loads = threadIdx.x == kFewMultipliers;
    const int begin = static_cast<int>(blockIdx.x) / splits;  // the cluster's first tile
    if (loads) prefetch_few<kRows, kNMajorB>(args, begin * kFewColumns, first, end);
    ptx::wait_for_grid_before();

    if (!multiplies) {
        ptx::fewer_registers<40>();
        Cursor<S::kStages> cursor;
        // By a warp that is idle; multipliers read it behind the first barrier of the cluster.
        if (threadIdx.x == kFewMultipliers + kWarp) {
            shared.epoch = epoch_of_brief_call(args.workspace);
        }
        __syncwarp();
        for (int tile = begin; tile < tiles; tile += clusters) {
            if (loads) {
                load_few<kRows, kNMajorB>(shared, cursor, args, tile * kFewColumns, first, end);
                if (tile + clusters >= tiles) ptx::let_next_grid_start();
                shared.mark(FewRowsMark::loaded);
            }
            __syncwarp();
            for (int barrier = 0; barrier < 2; ++barrier) ptx::cluster_barrier();
            if (threadIdx.x < kFewMultipliers + kWarp) await_free_stages();
        }
        return;
    }
    ptx::more_registers<232>();
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
    const bool marks = kTraced && threadIdx.x == 0;
    if (marks) shared.mark(FewRowsMark::free);
    // While the first weights are under way; threads beyond a whole tile's share send nothing.
    const int vectors = (args.m * kFewColumns / 8 + splits - 1) / splits;
    if (args.workspace.world > 1 && static_cast<int>(threadIdx.x) < vectors) mailbox::open();
    if (marks) shared.mark(FewRowsMark::open);
    Cursor<S::kStages> stage;
    for (int tile = begin; tile < tiles; tile += clusters) {
        {
            float sum[kRows / 2];
            multiply_few<kRows, Element, kNMajorB>(shared, stage, group, end - first, sum);
            if (marks) shared.mark(FewRowsMark::multiplied);
            multipliers_barrier();  // all have read the stages
            write_few<kRows>(shared, group, args.m, sum);
        }
        ptx::cluster_barrier();  // partial sums are there
        if (marks) shared.mark(FewRowsMark::together);
        const FewShare share(args, tile, part, splits);
        const auto exchange = [&]<bool kUnrounded>() {
            FewExchange<kRows, Element, kUnrounded> parts(shared, args, share);
            parts.send(splits);
            if (marks) shared.mark(FewRowsMark::sent);
            __syncwarp();
            ptx::cluster_arrive();  // and have been read
            parts.receive(waiter, tile);
            if (marks) shared.mark(FewRowsMark::taken);
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
    if (marks) {
        shared.mark(FewRowsMark::ended);
        shared.trace.store(args.trace, shared.epoch);
    }
}

template <int kRows, class Element>
cudaError_t start_few_rows(const FewRowsArgs& args, bool n_major, int splits, int blocks,
                           cudaStream_t stream) {
    const auto kernel = n_major ? few_rows<kRows, Element, true> : few_rows<kRows, Element, false>;
    int processors = 0;
    const cudaError_t status =
        Prepared::find(reinterpret_cast<const void*>(kernel), sizeof(FewRows<kRows>), processors);
    if (status != cudaSuccess) return status;
    if (blocks <= 0 || blocks > processors) blocks = processors;
    const int tiles = (args.n + kFewColumns - 1) / kFewColumns;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    // It gets ready while what is before it on the stream ends.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = std::min(std::max(blocks / splits, 1), tiles) * splits;
    config.blockDim = kFewThreads;
    config.dynamicSmemBytes = sizeof(FewRows<kRows>);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Element>
cudaError_t launch_few_rows(const FewRowsArgs& args, bool n_major, int splits, int blocks,
                            cudaStream_t stream) {
    const auto start = [&]<int kRows>() {
        return start_few_rows<kRows, Element>(args, n_major, splits, blocks, stream);
    };
    switch (few_rows_height(args.m)) {
        case 16:
            return start.template operator()<16>();
        case 32:
            return start.template operator()<32>();
        case 64:
            return start.template operator()<64>();
        case 128:
            return start.template operator()<128>();
        default:
            return start.template operator()<256>();
    }
}

}  // namespace mkernel::hopper
