// The norm of rows that the kernel of few_rows.cuh has summed.
//
// The blocks with the same part of K, one a tile, have the same share of rows. Each raises the share's word once
// its tile of these rows is in residual_out; the last one signals that they are whole by a new number, so
// that the word is otherwise as it was and the next call, or replay, counts from zero again:
//   word   number of calls so far (32 bits) | a block has left | blocks that have arrived in this one
// A block that waits for the new number still has its tile in shared memory and normalises it. Blocks that
// are not running yet may need the place of one that waits, so no block waits for longer than kPatienceNs: it
// leaves, and marks that in the word, and the last block normalises the rows of all tiles. The result has the
// same bits: rounded values, whose squares are added up in the order of columns by any block.
#pragma once

#include "backends/accelerators/hopper/kernels/eight.cuh"
#include "backends/accelerators/hopper/kernels/gemm/few_rows/block.cuh"
#include "backends/transport/clock.hpp"

namespace mkernel::hopper {

// Fetches the residual and the norm's weight to L2, while the product's weights come. Called by threads from
// kFewFetchers on.
template <class Element>
__device__ __forceinline__ void fetch_ahead(const FewRowsArgs& args, const FewShare& share) {
    const auto* const weight = static_cast<const Element*>(args.norm.weight) + share.column;
    const auto* const residual = static_cast<const Element*>(args.norm.residual);
    const int thread = static_cast<int>(threadIdx.x) - kFewFetchers;
    if (thread < share.vectors) ptx::prefetch(weight + thread * 8);
    if (residual == nullptr) return;
    for (int vector = share.first + thread; vector < share.end;
         vector += kFewThreads - kFewFetchers) {
        const int row = vector / share.vectors;
        const int column = share.column + vector % share.vectors * 8;
        ptx::prefetch(residual + static_cast<std::uint64_t>(row) * args.n + column);
    }
}

// The norm of a tile's rows. Used by all the multipliers' threads of a block whose cluster has one tile.
template <int kRows, class Element>
class FewNorm {
  public:
    __device__ FewNorm(FewRows<kRows>& shared, const FewRowsArgs& args, int tile, int part,
                       int splits)
        : shared_(shared),
          args_(args),
          share_(args, tile, part, splits),
          word_(&args.workspace.control().row_shares[part].arrived),
          squares_(
              reinterpret_cast<float*>(args.workspace.brief(args.workspace.rank, shared.epoch))),
          tile_(tile),
          tiles_((args.n + kFewColumns - 1) / kFewColumns) {}

    __device__ void run() {
        const uint4 weight = load_weight(share_.column, share_.vectors);
        multipliers_barrier();  // all vectors are kept
        store_squares();
        multipliers_barrier();
        if (threadIdx.x == 0) shared_.normalises = static_cast<int>(arrive());
        multipliers_barrier();
        const auto what = static_cast<Whose>(shared_.normalises);
        if (what == Whose::nobodys) return;
        find_scales();
        multipliers_barrier();
        normalise(share_.column, share_.vectors, weight, [&](int row, int column) {
            return *reinterpret_cast<const uint4*>(sums(row) + column);
        });
        if (what == Whose::all) normalise_others();
    }

  private:
    // The tiles that this block normalises.
    enum class Whose : int { nobodys, own, all };

    static constexpr unsigned long long kLeft = 1ull << 31;
    static constexpr unsigned long long kArrived = kLeft - 1;
    static constexpr int kNumberShift = 32;
    static constexpr std::uint64_t kPatienceNs = 30'000;
    static constexpr int kVectors = kFewColumns / 8;  // of a tile, at most
    static constexpr int kRowsAtOnce = kFewMultipliers / kVectors;
    static constexpr int kAdders = 8;  // lanes of a row
    static constexpr int kRowsAdded = kFewMultipliers / kAdders;

    __device__ float* sums(int row) const { return shared_.sums() + row * FewRows<kRows>::kPitch; }
    // The factor of a row, stored after its columns.
    __device__ float& scale(int row) const { return sums(row)[kFewColumns]; }
    // The sum of squares of a tile's columns of a row.
    __device__ float* squares(int row, int tile) const { return squares_ + row * tiles_ + tile; }

    __device__ uint4 load_weight(int column, int vectors) const {
        const int vector = static_cast<int>(threadIdx.x) % kVectors;
        if (vector >= vectors) return {};
        return ptx::load_16(static_cast<const Element*>(args_.norm.weight) + column + vector * 8);
    }

    __device__ void store_squares() const {
        for (int row = share_.first_row + static_cast<int>(threadIdx.x); row < share_.end_row;
             row += kFewMultipliers) {
            float sum = 0;
            for (int vector = 0; vector < share_.vectors; ++vector)
                sum += sums(row)[vector * 8 + 4];
            *squares(row, tile_) = sum;
        }
    }

    // Called by one thread, after a barrier of all that have written. Data that others wrote may be read
    // after another barrier.
    __device__ Whose arrive() const {
        __threadfence();
        const unsigned long long before = atomicAdd(word_, 1ull);
        const unsigned long long number = before >> kNumberShift;
        Whose found = Whose::own;
        if ((before & kArrived) + 1 == static_cast<unsigned long long>(tiles_)) {
            if ((before & kLeft) != 0) found = Whose::all;
            __threadfence();
            atomicExch(word_, (number + 1) << kNumberShift);
        } else if (!await(number)) {
            found = Whose::nobodys;
        }
        __threadfence();
        return found;
    }

    // Waits until the rows are whole and returns true; otherwise the last block knows that this one has left.
    __device__ bool await(unsigned long long number) const {
        const std::uint64_t start = transport::global_ns();
        for (;;) {
            const unsigned long long now = look();
            if (now >> kNumberShift != number) return true;
            const bool complete = (now & kArrived) == static_cast<unsigned long long>(tiles_);
            if (complete || transport::global_ns() - start < kPatienceNs) continue;
            if (atomicCAS(word_, now, now | kLeft) == now) return false;
        }
    }
    __device__ unsigned long long look() const {
        unsigned long long now;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(word_) : "memory");
        return now;
    }

    __device__ void find_scales() const {
        const int lane = static_cast<int>(threadIdx.x) % kAdders;
        for (int first = share_.first_row; first < share_.end_row; first += kRowsAdded) {
            const int row = first + static_cast<int>(threadIdx.x) / kAdders;
            const bool is_there = row < share_.end_row;
            float sum = 0;
            if (is_there) {
#pragma unroll 8
                for (int tile = lane; tile < tiles_; tile += kAdders) {
                    sum += __ldcg(squares(row, tile));
                }
            }
#pragma unroll
            for (int apart = kAdders / 2; apart > 0; apart /= 2) {
                sum += __shfl_xor_sync(~0u, sum, apart);
            }
            if (is_there && lane == 0) {
                scale(row) = rsqrtf(sum / static_cast<float>(args_.n) + args_.norm.eps);
            }
        }
    }

    // Normalises a tile's columns of the share's rows, of which `load` has 8.
    template <class Load>
    __device__ void normalise(int column, int vectors, uint4 weights, const Load& load) const {
        const int vector = static_cast<int>(threadIdx.x) % kVectors;
        if (vector >= vectors) return;
        float weight[8] = {};
        add_eight<Element>(weight, weights);
        for (int row = share_.first_row + static_cast<int>(threadIdx.x) / kVectors;
             row < share_.end_row; row += kRowsAtOnce) {
            float values[8] = {};
            add_eight<Element>(values, load(row, vector * 8));
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = values[i] * scale(row) * weight[i];
            ptx::store_16(static_cast<Element*>(args_.out) + element(row, column + vector * 8),
                          round_eight<Element>(values));
        }
    }

    // Normalises the tiles of the other blocks, also of those that have not left: they write the same.
    __device__ void normalise_others() const {
        const auto* const rows = static_cast<const Element*>(args_.norm.residual_out);
        for (int tile = 0; tile < tiles_; ++tile) {
            const int column = tile * kFewColumns;
            const int vectors = min(kFewColumns, args_.n - column) / 8;
            if (tile == tile_) continue;
            normalise(column, vectors, load_weight(column, vectors), [&](int row, int at) {
                return __ldcg(reinterpret_cast<const uint4*>(rows + element(row, column + at)));
            });
        }
    }

    __device__ std::uint64_t element(int row, int column) const {
        return static_cast<std::uint64_t>(row) * args_.n + column;
    }

    FewRows<kRows>& shared_;
    const FewRowsArgs& args_;
    const FewShare share_;
    unsigned long long* const word_;
    float* const squares_;
    const int tile_, tiles_;
};

}  // namespace mkernel::hopper
