// The way from partial sums of a cluster's blocks to `out`: added up, sent to the peers, added to theirs.
#pragma once

#include "backends/accelerators/cuda/device/mailbox.cuh"
#include "backends/accelerators/cuda/kernels/eight.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/block.cuh"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/scales.cuh"

namespace mkernel::hopper {

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

// The block's share of a tile, from the cluster's partial sums on. Used by all the multipliers' threads; each
// has vectors of its own in every step, so it may read in the next step what it wrote in one.
template <int kRows, class Element, class In, bool kUnrounded>
class FewExchange {
  public:
    using Vector = Travelling<Element, kUnrounded>;

    __device__ FewExchange(FewRows<kRows>& shared, const FewRowsArgs& args, const FewShare& share)
        : shared_(shared), args_(args), share_(share) {}

    // Adds up the partial sums of the cluster's blocks, and sends the result; own sums stay where partial
    // ones were.
    __device__ void send(int splits) {
        for (int first = share_.first + static_cast<int>(threadIdx.x); first < share_.end;
             first += kFewMultipliers * kAdded) {
            FewScales<sizeof(In) == 1> scales[kAdded];
#pragma unroll
            for (int i = 0; i < kAdded; ++i) {
                const int vector = first + i * kFewMultipliers;
                if (vector >= share_.end) continue;
                scales[i].load(args_.scales, row_of(vector), share_.column + column_of(vector));
            }
            float sum[kAdded][8] = {};
            add_parts(first, splits, sum);
#pragma unroll
            for (int i = 0; i < kAdded; ++i) {
                const int vector = first + i * kFewMultipliers;
                if (vector >= share_.end) continue;
                scales[i].multiply(sum[i]);
                Vector own;
                own.pack(sum[i]);
                auto* const kept = reinterpret_cast<uint4*>(partial(vector));
#pragma unroll
                for (int word = 0; word < Vector::kWords; ++word) kept[word] = own.words[word];
                send_to_peers(vector, own);
            }
        }
    }

    // Adds up the ranks' sums, into `out`.
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
    // The vectors that are added up at once; registers are scarce with 256 rows, and with scales.
    static constexpr int kAdded = kRows > 128 ? 1 : sizeof(In) == 1 ? 2 : kBatch;
    static constexpr int kSplitsAtOnce = kRows > 128 ? 4 : 2;

    // Adds the cluster's blocks' sums of this thread's vectors from `first` on, in the order of K.
    __device__ void add_parts(int first, int splits, float (&sum)[kAdded][8]) const {
        for (int split = 0; split < splits; split += kSplitsAtOnce) {
            float4 parts[kSplitsAtOnce][kAdded][2];
#pragma unroll
            for (int each = 0; each < kSplitsAtOnce; ++each) {
#pragma unroll
                for (int i = 0; i < kAdded; ++i) {
                    const int vector = first + i * kFewMultipliers;
                    if (split + each >= splits || vector >= share_.end) continue;
                    const float* const at = partial(vector);
                    parts[each][i][0] = ptx::load_of_block(at, split + each);
                    parts[each][i][1] = ptx::load_of_block(at + 4, split + each);
                }
            }
#pragma unroll
            for (int each = 0; each < kSplitsAtOnce; ++each) {
#pragma unroll
                for (int i = 0; i < kAdded; ++i) {
                    const int vector = first + i * kFewMultipliers;
                    if (split + each >= splits || vector >= share_.end) continue;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sum[i][4 * half] += parts[each][i][half].x;
                        sum[i][4 * half + 1] += parts[each][i][half].y;
                        sum[i][4 * half + 2] += parts[each][i][half].z;
                        sum[i][4 * half + 3] += parts[each][i][half].w;
                    }
                }
            }
        }
    }

    __device__ void send_to_peers(int vector, const Vector& own) const {
        const Workspace& workspace = args_.workspace;
        for (int step = 1; step < workspace.world; ++step) {
            const int peer = (workspace.rank + step) % workspace.world;
            if (!is_of(peer, vector)) continue;
            char* const to = mail(peer, workspace.rank, shared_.epoch, vector);
#pragma unroll
            for (int i = 0; i < Vector::kWords; ++i) mailbox::send(to + 16 * i, own.words[i]);
        }
    }

    __device__ int row_of(int vector) const { return vector / share_.vectors; }
    // Returns the row in that rank's `out`, one of [0, rows) if the rank has it there and adds it up.
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
    // Returns the number of the element in that rank's `out`.
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
        const std::uint64_t at = element(args_.workspace.rank, vector);
        ptx::store_16(static_cast<Element*>(args_.out) + at, round_eight<Element>(whole));
    }

    FewRows<kRows>& shared_;
    const FewRowsArgs& args_;
    const FewShare share_;
};

}  // namespace mkernel::hopper
