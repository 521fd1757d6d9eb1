// The kernels of sum_rows.hpp and their launches.
#include "backends/accelerators/cuda/kernels/collectives/sum_rows.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/device/mailbox.cuh"
#include "backends/accelerators/cuda/device/prefetch.cuh"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"
#include "backends/accelerators/cuda/kernels/e4m3.cuh"
#include "backends/accelerators/cuda/kernels/eight.cuh"
#include "backends/accelerators/cuda/kernels/prepared.cuh"
#include "backends/accelerators/cuda/small_launch.cuh"

namespace mkernel::cuda {
namespace {

constexpr int kMostThreads = 1024;  // of a block, and of those on a multiprocessor
constexpr int kWarp = 32;
// Threads of a row; with float32 terms, which are of few rows, they need more registers.
template <class In>
constexpr int kRowThreads = sizeof(In) == 2 ? kMostThreads : kMostThreads / 2;

struct Args {
    Workspace workspace;
    transport::WaitLimits limits;
    RowsOfSums sums;
    std::uint32_t owned;  // rows of each rank but perhaps the last ones; of two exchanges
    std::uint64_t slot;   // bytes of mail from one rank

    __device__ int peer(int step) const { return (workspace.rank + step) % workspace.world; }
    __device__ transport::DeviceWaiter waiter() const {
        return waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    }
    // Returns the bytes of so many rows.
    __device__ std::uint64_t bytes(std::uint32_t rows) const {
        return std::uint64_t{2} * rows * sums.columns;
    }
    // Returns the place of slot `number` in the mail area of rank `at`. One exchange has a slot for every rank. Each
    // of two has one for every peer: what rank r sends to the rank `step` after it is that rank's slot `step` - 1, or
    // `world` - 1 more for sums, and comes from the rank `world` - `step` after it.
    __device__ char* mail(int at, int number, std::uint64_t epoch) const {
        return workspace.mail(at, epoch) + number * slot;
    }
};

// Sets `sum` to the sum of every thread of the block's `mine`, added up in the order of warps; returns whether all
// threads are going on.
__device__ bool block_sum(float mine, bool going, float& sum) {
    __shared__ float of_warps[kMostThreads / 32];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) mine += __shfl_xor_sync(~0u, mine, apart);
    if (__syncthreads_and(going) == 0) return false;  // the sums of the row before were read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp];
    return true;
}

// 8 terms of a row.
template <class In>
using Terms = collectives::Eight<In>;

// A row of 8 elements a vector, which lies `place` bytes into each of several arrays of rows. A thread has every
// blockDim.x-th vector, in each step the same ones, and handles kBatch of them at a time: 1 where it has no more, as
// registers are scarce and what is loaded ahead of a wait must not go to local memory.
template <class Element, int kBatch>
struct Row {
    std::uint64_t place;
    unsigned vectors;

    __device__ Row(const RowsOfSums& sums, std::uint32_t number)
        : place(std::uint64_t{2} * number * sums.columns), vectors(sums.columns / 8) {}

    // Calls `each(i, vector)` for the thread's vectors from `first` on.
    template <class Each>
    __device__ void for_batch(unsigned first, Each&& each) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const unsigned vector = first + i * blockDim.x;
            if (vector < vectors) each(i, vector);
        }
    }
    // Calls `each(first)` for every batch of the thread's.
    template <class Each>
    __device__ void for_batches(Each&& each) const {
        for (unsigned first = threadIdx.x; first < vectors; first += blockDim.x * kBatch) {
            each(first);
        }
    }
    __device__ void load(const void* rows, unsigned first, uint4 (&words)[kBatch]) const {
        load_from(static_cast<const char*>(rows) + place, first, words);
    }
    // Loads terms, which may be of another type than the rows' elements.
    template <class In>
    __device__ void load_terms(const void* rows, unsigned first, Terms<In> (&terms)[kBatch]) const {
        const char* const row = static_cast<const char*>(rows) + place_of<In>();
        for_batch(first,
                  [&](int i, unsigned vector) { terms[i].load(row + vector * sizeof(Terms<In>)); });
    }
    template <class In>
    __device__ std::uint64_t place_of() const {
        return place * (sizeof(In) / 2);
    }
    // Loads a row that is the only one.
    __device__ void load_from(const void* row, unsigned first, uint4 (&words)[kBatch]) const {
        for_batch(first, [&](int i, unsigned vector) {
            words[i] = ptx::load_16(static_cast<const char*>(row) + vector * 16);
        });
    }
    // Sets where the words of the batch lie in a row of terms at `row`, null for what is not there.
    template <class In = Element>
    __device__ void places(char* row, unsigned first,
                           char* (&at)[kBatch * Terms<In>::kVectors]) const {
#pragma unroll
        for (char*& each : at) each = nullptr;
        for_batch(first, [&](int i, unsigned vector) {
#pragma unroll
            for (int word = 0; word < Terms<In>::kVectors; ++word) {
                at[i * Terms<In>::kVectors + word] = row + vector * sizeof(Terms<In>) + word * 16;
            }
        });
    }
    __device__ void store(void* rows, unsigned vector, const float (&values)[8]) const {
        store_words(rows, vector, round_eight<Element>(values));
    }
    __device__ void store_words(void* rows, unsigned vector, uint4 words) const {
        ptx::store_16(static_cast<char*>(rows) + place + vector * 16, words);
    }
    // Returns 8 normalised elements, rounded.
    static __device__ uint4 normed(const float (&r)[8], float scale, uint4 weights) {
        float weight[8] = {}, normed[8];
        add_eight<Element>(weight, weights);
#pragma unroll
        for (int i = 0; i < 8; ++i) normed[i] = r[i] * scale * weight[i];
        return round_eight<Element>(normed);
    }
    __device__ void store_quantised(void* rows, unsigned vector, uint4 words,
                                    const Quantiser& quantiser) const {
        const auto two = [&](std::uint32_t word) {
            const float2 both = ptx::unpack<Element>(word);
            return std::uint32_t{quantiser.two(both.x, both.y)};
        };
        *reinterpret_cast<uint2*>(static_cast<char*>(rows) + place / 2 + vector * 8) = {
            two(words.x) | two(words.y) << 16, two(words.z) | two(words.w) << 16};
    }
};

// The largest of 16-bit elements by their sizes' bits, in whose order NaN is the largest.
class Largest {
  public:
    __device__ void add(uint4 words) {
        const std::uint32_t two[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (const std::uint32_t each : two) most_ = __vmaxu2(most_, each & 0x7FFF7FFFu);
    }
    // Returns the scale of a row whose elements all threads of the block have added. A barrier lies between two
    // calls.
    template <class Element>
    __device__ float scale_of_row() const {
        __shared__ unsigned of_warps[kMostThreads / 32];
        unsigned most = __reduce_max_sync(~0u, max(most_ & 0xFFFFu, most_ >> 16));
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
        __syncthreads();
        for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) most = max(most, of_warps[warp]);
        return e4m3_scale(size_bits(ptx::unpack<Element>(most).x));
    }

  private:
    std::uint32_t most_ = 0;
};

__device__ inline float squares_of(const float (&values)[8]) {
    float sum = 0;
#pragma unroll
    for (const float each : values) sum += each * each;
    return sum;
}

// Returns the factor of a row whose squares have this sum.
__device__ inline float scale_of(const RowsOfSums& sums, float squares) {
    return rsqrtf(squares / static_cast<float>(sums.columns) + sums.norm.eps);
}

// Stores a row in e4m3, and its scale. `rounded(vector)` returns 8 of its elements in 16 bits, all of which threads have
// added to their `largest`. Called by all threads.
template <class Element, int kBatch, class Rounded>
__device__ void quantise_row(const Row<Element, kBatch>& row, const RowNorm& norm,
                             std::uint32_t number, const Largest& largest, Rounded&& rounded) {
    const float scale = largest.scale_of_row<Element>();
    const Quantiser quantiser(scale);
    for (unsigned vector = threadIdx.x; vector < row.vectors; vector += blockDim.x) {
        row.store_quantised(norm.quantised, vector, rounded(vector), quantiser);
    }
    if (threadIdx.x == 0) norm.scales[number] = scale;
}

// Stores a row, or its norm. `sum(row, first, sums)` adds up the thread's vectors from `first` on, and returns whether
// all arrived. It may wait, so whatever else the row needs is loaded before. Returns whether all went on; without a
// norm, whether this thread did. Called by all threads.
template <class Element, int kBatch, bool kNorm, class Sum>
__device__ bool finish_row(const RowsOfSums& rows, std::uint32_t number, Sum&& sum) {
    extern __shared__ __align__(16) float unrounded[];  // a row, where it is normalised
    const Row<Element, kBatch> row(rows, number);
    const RowNorm& norm = rows.norm;
    uint4 weights[kBatch];
    if constexpr (kNorm) row.load_from(norm.weight, threadIdx.x, weights);
    float squares = 0;
    bool going = true;
    row.for_batches([&](unsigned first) {
        uint4 residual[kBatch] = {};
        if (kNorm && norm.residual != nullptr) row.load(norm.residual, first, residual);
        float sums[kBatch][8] = {};
        going = going && sum(row, first, sums);
        if (!going) return;
        row.for_batch(first, [&](int i, unsigned vector) {
            if constexpr (kNorm) {
                add_eight<Element>(sums[i], residual[i]);
                squares += squares_of(sums[i]);
                row.store(norm.residual_out, vector, sums[i]);
#pragma unroll
                for (int half = 0; half < 8; half += 4) {
                    *reinterpret_cast<float4*>(unrounded + vector * 8 + half) = {
                        sums[i][half], sums[i][half + 1], sums[i][half + 2], sums[i][half + 3]};
                }
            } else {
                row.store(rows.out, vector, sums[i]);
            }
        });
    });
    if constexpr (!kNorm) return going;
    if (!block_sum(squares, going, squares)) return false;
    const float scale = scale_of(rows, squares);
    Largest largest;
    row.for_batches([&](unsigned first) {
        if (first != threadIdx.x) row.load_from(norm.weight, first, weights);
        row.for_batch(first, [&](int i, unsigned vector) {
            float* const at = unrounded + vector * 8;
            float r[8];
#pragma unroll
            for (int each = 0; each < 8; ++each) r[each] = at[each];
            const uint4 words = row.normed(r, scale, weights[i]);
            if (norm.quantised == nullptr) {
                row.store_words(rows.out, vector, words);
            } else {
                largest.add(words);
                *reinterpret_cast<uint4*>(at) = words;
            }
        });
    });
    if (norm.quantised == nullptr) return true;
    quantise_row(row, norm, number, largest, [&](unsigned vector) {
        return *reinterpret_cast<const uint4*>(unrounded + vector * 8);
    });
    return true;
}

template <class In>
__device__ void add_terms(float (&sum)[8], const uint4* words) {
    const In* const each = reinterpret_cast<const In*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += collectives::widen(each[i]);
}

template <class Element, int kBatch>
__device__ void add_batch(const Row<Element, kBatch>& row, unsigned first, float (&sums)[kBatch][8],
                          const uint4 (&words)[kBatch]) {
    row.for_batch(first, [&](int i, unsigned) { add_eight<Element>(sums[i], words[i]); });
}

// Sends this rank's terms of a row by mail, to `to(step)` for steps from `first` to before `end`. `terms`: those of the
// thread's first batch. Called by all threads.
template <class In, class Element, int kBatch, class To>
__device__ void send_row(const RowsOfSums& sums, const Row<Element, kBatch>& row,
                         Terms<In> (&terms)[kBatch], int first, int end, To&& to) {
    row.for_batches([&](unsigned begin) {
        if (begin != threadIdx.x) row.load_terms(sums.from, begin, terms);
#pragma unroll 1
        for (int step = first; step < end; ++step) {
            char* const at = to(step);
            row.for_batch(begin, [&](int i, unsigned vector) {
#pragma unroll
                for (int word = 0; word < Terms<In>::kVectors; ++word) {
                    mailbox::send(at + vector * sizeof(terms[i]) + word * 16,
                                  mailbox::mailable(terms[i].v[word]));
                }
            });
        }
    });
}

struct NoTree {};

// A block sends its next row before it waits for this one. Blocks without a row prefetch alone.
template <class Element, class In, int kBatch, bool kNorm, bool kTree = false>
__global__ void __launch_bounds__(kRowThreads<In>, 1)
    sum_rows_kernel(const __grid_constant__ Args args) {
    ptx::wait_for_grid_before();
    const Workspace& workspace = args.workspace;
    // Terms of a row's first batch; of the block's first row, they come beside the epoch.
    Terms<In> terms[kBatch];
    const auto fetch = [&](std::uint32_t number) {
        Row<Element, kBatch>(args.sums, number).load_terms(args.sums.from, threadIdx.x, terms);
    };
    const Prefetch& prefetch = args.sums.prefetch;
    const bool exchanges = blockIdx.x < args.sums.rows;
    if (exchanges) fetch(blockIdx.x);
    const BriefBlock brief(workspace, prefetch.exchange);
    const std::uint64_t epoch = brief.epoch();
    const auto waiter = args.waiter();
    const auto send = [&](std::uint32_t number) {
        const Row<Element, kBatch> row(args.sums, number);
        send_row(args.sums, row, terms, 1, workspace.world, [&](int step) {
            return args.mail(args.peer(step), workspace.rank, epoch) + row.template place_of<In>();
        });
    };
    const auto take = [&](std::uint32_t number) {
        const auto sum = [&](const Row<Element, kBatch>& row, unsigned first,
                             float(&sums)[kBatch][8]) {
            Terms<In> own[kBatch];
            row.load_terms(args.sums.from, first, own);
            [[maybe_unused]] collectives::TreeOr<kTree, In, NoTree> trees[kBatch];
            const auto add = [&](int i, const uint4* words) {
                if constexpr (kTree) {
                    trees[i].add(*words);
                } else {
                    add_terms<In>(sums[i], words);
                }
            };
#pragma unroll 1
            for (int source = 0; source < workspace.world; ++source) {
                if (source == workspace.rank) {
                    row.for_batch(first, [&](int i, unsigned) { add(i, own[i].v); });
                    continue;
                }
                const auto peer = static_cast<std::uint32_t>(source);
                uint4 words[kBatch * Terms<In>::kVectors];
                char* at[kBatch * Terms<In>::kVectors];
                row.template places<In>(
                    args.mail(workspace.rank, source, epoch) + row.template place_of<In>(), first,
                    at);
                if (!mailbox::take(at, words, waiter, {transport::kMail, peer, number}))
                    return false;
                row.for_batch(first,
                              [&](int i, unsigned) { add(i, words + i * Terms<In>::kVectors); });
            }
            if constexpr (kTree) {
                row.for_batch(first, [&](int i, unsigned) { trees[i].add_root_to(sums[i]); });
            }
            return true;
        };
        return finish_row<Element, kBatch, kNorm>(args.sums, number, sum);
    };
    if (exchanges) send(blockIdx.x);
    brief.move_on(workspace);
    if (threadIdx.x == blockDim.x - 1) prefetch_share(prefetch);
    for (std::uint32_t number = blockIdx.x; number < args.sums.rows; number += gridDim.x) {
        if (const std::uint32_t next = number + gridDim.x; next < args.sums.rows) {
            fetch(next);
            send(next);
        }
        if (!take(number)) break;
    }
}

// Row `index` of every part is handled by one block, and a vector of it by one thread from its first word to its last:
// so `out` may be `from`.
template <class Element, int kBatch>
__global__ void __launch_bounds__(kMostThreads, 1)
    sum_rows_twice_kernel(const __grid_constant__ Args args) {
    ptx::wait_for_grid_before();
    const Workspace& workspace = args.workspace;
    const int world = workspace.world;
    const Prefetch& prefetch = args.sums.prefetch;
    const BriefBlock brief(workspace, prefetch.exchange);
    const std::uint64_t epoch = brief.epoch();
    const auto waiter = args.waiter();
    const auto row_of = [&](int rank, std::uint32_t index) { return rank * args.owned + index; };
    const auto send = [&](std::uint32_t index) {
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            const std::uint32_t number = row_of(args.peer(step), index);
            if (number >= args.sums.rows) continue;
            const Row<Element, kBatch> row(args.sums, number);
            Terms<Element> terms[kBatch];
            row.load_terms(args.sums.from, threadIdx.x, terms);
            send_row(args.sums, row, terms, step, step + 1, [&](int to) {
                return args.mail(args.peer(to), to - 1, epoch) + args.bytes(index);
            });
        }
        if (index == blockIdx.x) brief.move_on(workspace);
        return true;
    };
    const auto own = [&](std::uint32_t index) {
        const std::uint32_t number = row_of(workspace.rank, index);
        const auto sum = [&](const Row<Element, kBatch>& row, unsigned first,
                             float(&sums)[kBatch][8]) {
            uint4 words[kBatch];
            row.load(args.sums.from, first, words);
            add_batch(row, first, sums, words);
#pragma unroll 1
            for (int step = 1; step < world; ++step) {
                const auto peer = static_cast<std::uint32_t>(args.peer(step));
                char* at[kBatch];
                row.places(args.mail(workspace.rank, world - step - 1, epoch) + args.bytes(index),
                           first, at);
                if (!mailbox::take(at, words, waiter, {transport::kMail, peer, number}))
                    return false;
                add_batch(row, first, sums, words);
            }
            row.for_batch(first, [&](int i, unsigned vector) {
                words[i] = mailbox::sendable(round_eight<Element>(sums[i]));
#pragma unroll 1
                for (int step = 1; step < world; ++step) {
                    char* const to = args.mail(args.peer(step), world + step - 2, epoch);
                    mailbox::send_rounded(to + args.bytes(index) + vector * 16, words[i]);
                }
#pragma unroll
                for (float& each : sums[i]) each = 0;
            });
            add_batch(row, first, sums, words);  // as the peers find them
            return true;
        };
        return number >= args.sums.rows ||
               finish_row<Element, kBatch, true>(args.sums, number, sum);
    };
    const auto take = [&](std::uint32_t index) {
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            const auto peer = static_cast<std::uint32_t>(args.peer(step));
            const std::uint32_t number = row_of(args.peer(step), index);
            if (number >= args.sums.rows) continue;
            const auto sum = [&](const Row<Element, kBatch>& row, unsigned first,
                                 float(&sums)[kBatch][8]) {
                uint4 words[kBatch];
                char* at[kBatch];
                row.places(
                    args.mail(workspace.rank, 2 * world - step - 2, epoch) + args.bytes(index),
                    first, at);
                if (!mailbox::take_rounded(at, words, waiter, {transport::kMail, peer, number}))
                    return false;
                add_batch(row, first, sums, words);
                return true;
            };
            if (!finish_row<Element, kBatch, true>(args.sums, number, sum)) return false;
        }
        return true;
    };
    if (blockIdx.x >= args.owned) brief.move_on(workspace);
    if (threadIdx.x == blockDim.x - 1) prefetch_share(prefetch);
    collectives::for_each_chunk(args.owned, send, own, take);
}

template <class Element, int kBatch>
__global__ void __launch_bounds__(kMostThreads, kBatch == 1 ? 2 : 1)
    norm_rows_kernel(const __grid_constant__ RowsOfSums sums) {
    ptx::wait_for_grid_before();
    const RowNorm& norm = sums.norm;
    for (std::uint32_t number = blockIdx.x; number < sums.rows; number += gridDim.x) {
        const Row<Element, kBatch> row(sums, number);
        uint4 weights[kBatch];
        row.load_from(norm.weight, threadIdx.x, weights);
        float r[kBatch][8];
        const auto load = [&](unsigned first) {
            uint4 words[kBatch], residual[kBatch] = {};
            row.load(sums.from, first, words);
            if (norm.residual != nullptr) row.load(norm.residual, first, residual);
            row.for_batch(first, [&](int i, unsigned) {
#pragma unroll
                for (float& each : r[i]) each = 0;
                add_eight<Element>(r[i], words[i]);
                add_eight<Element>(r[i], residual[i]);
            });
        };
        float squares = 0;
        row.for_batches([&](unsigned first) {
            load(first);
            row.for_batch(first, [&](int i, unsigned vector) {
                squares += squares_of(r[i]);
                row.store(norm.residual_out, vector, r[i]);
            });
        });
        block_sum(squares, true, squares);
        const float scale = scale_of(sums, squares);
        const bool kept = row.vectors <= kBatch * blockDim.x;
        row.for_batches([&](unsigned first) {
            if (!kept) {  // once more: from L2, where they are now
                load(first);
                row.load_from(norm.weight, first, weights);
            }
            row.for_batch(first, [&](int i, unsigned vector) {
                row.store_words(sums.out, vector, row.normed(r[i], scale, weights[i]));
            });
        });
    }
    if (norm.quantised == nullptr) return;
    for (std::uint32_t number = blockIdx.x; number < sums.rows; number += gridDim.x) {
        const Row<Element, kBatch> row(sums, number);
        const auto rounded = [&](unsigned vector) {
            return ptx::load_16(static_cast<const char*>(sums.out) + row.place + vector * 16);
        };
        Largest largest;
        for (unsigned vector = threadIdx.x; vector < row.vectors; vector += blockDim.x) {
            largest.add(rounded(vector));
        }
        quantise_row(row, norm, number, largest, rounded);
        __syncthreads();
    }
}

// Returns the rows that a rank sums for all, except perhaps the last ones.
std::uint32_t owned_rows(int world, const RowsOfSums& sums) {
    return (sums.rows + world - 1) / world;
}

std::uint64_t slot_bytes(int world, const RowsOfSums& sums) {
    const std::uint32_t rows = sums.twice ? owned_rows(world, sums) : sums.rows;
    const std::uint64_t element = sums.unrounded ? sizeof(float) : 2;
    return (element * rows * sums.columns + 127) / 128 * 128;
}

void check(const RowsOfSums& sums) {
    if (sums.columns == 0 || sums.columns % 8 != 0) {
        throw std::invalid_argument("columns = " + std::to_string(sums.columns) +
                                    "; expected a multiple of 8");
    }
    const RowNorm& norm = sums.norm;
    for (const void* at :
         {sums.from, static_cast<const void*>(sums.out), norm.weight, norm.residual,
          static_cast<const void*>(norm.residual_out), static_cast<const void*>(norm.quantised)}) {
        if (reinterpret_cast<std::uintptr_t>(at) % 16 != 0) {
            throw std::invalid_argument("rows that are not aligned to 16 bytes");
        }
    }
    if ((norm.weight == nullptr) != (norm.residual_out == nullptr)) {
        throw std::invalid_argument("a norm has a weight and rows to write the new residual to");
    }
    if ((norm.quantised == nullptr) != (norm.scales == nullptr)) {
        throw std::invalid_argument("rows in e4m3 have scales");
    }
}

// Returns the same few sums, which no norm follows, as more rows of fewer columns: the parts of a row come sooner if
// several multiprocessors move them, as long as these are few (BriefBlock).
RowsOfSums in_shorter_rows(RowsOfSums sums) {
    constexpr std::uint32_t kColumns = 2048;
    while (sums.columns > kColumns && sums.columns % 16 == 0 &&
           2 * sums.rows <= BriefBlock::kFewBlocks) {
        sums.rows *= 2;
        sums.columns /= 2;
    }
    return sums;
}

// `rows`: those that blocks share. `each`: blocks of most threads on a multiprocessor, which has more where rows are
// narrow.
template <class Parameter>
void start(const char* what, void (*kernel)(Parameter), Parameter argument, const RowsOfSums& sums,
           std::uint32_t rows, std::uint32_t each, std::uint32_t most_shared, std::uint32_t shared,
           cudaStream_t stream) {
    int processors = 0;
    cuda::check(Prepared::find(reinterpret_cast<const void*>(kernel), most_shared, processors),
                what);
    const std::uint32_t blocks = sums.blocks == 0 ? processors : sums.blocks;
    const std::uint32_t most_threads = sums.unrounded ? kRowThreads<float> : kMostThreads;
    std::uint32_t threads = std::min((sums.columns / 8 + kWarp - 1) / kWarp * kWarp, most_threads);
    // A warp more, where there is room, counts the block (BriefBlock): its fence delays nothing that is sent.
    if (rows <= blocks) threads = std::min(threads + kWarp, most_threads);
    cudaLaunchConfig_t config{};
    const std::uint32_t most = blocks * each * (most_threads / threads);
    std::uint32_t grid = std::min(most, rows);
    if constexpr (std::is_same_v<Parameter, Args>) {
        grid = argument.sums.prefetch.blocks_beside(grid, most);
    }
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    cudaLaunchAttribute early{};  // it gets ready while what is before it on the stream ends
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = cuda::since_hopper(kernel) ? 1 : 0;
    cuda::check(cudaLaunchKernelEx(&config, kernel, argument), what);
}

// Returns whether a thread has one vector of a row at most.
bool are_short(const RowsOfSums& sums) {
    return sums.columns / 8 <= kMostThreads;
}

template <class Element, int kBatch>
auto kernel_of(const RowsOfSums& sums) {
    if (sums.tree) {
        return sums.norm.weight == nullptr ? &sum_rows_kernel<Element, Element, kBatch, false, true>
                                           : &sum_rows_kernel<Element, Element, kBatch, true, true>;
    }
    if (sums.norm.weight == nullptr) return &sum_rows_kernel<Element, Element, kBatch, false>;
    return sums.twice ? &sum_rows_twice_kernel<Element, kBatch>
                      : &sum_rows_kernel<Element, Element, kBatch, true>;
}

template <class Element>
auto kernel_of(const RowsOfSums& sums) {
    if (sums.unrounded) return &sum_rows_kernel<Element, float, 2, true>;
    return are_short(sums) ? kernel_of<Element, 1>(sums) : kernel_of<Element, 2>(sums);
}

template <class Element>
auto norm_kernel_of(const RowsOfSums& sums) {
    return are_short(sums) ? &norm_rows_kernel<Element, 1> : &norm_rows_kernel<Element, 2>;
}

}  // namespace

void check_sum_rows(int world, const RowsOfSums& sums) {
    const std::uint64_t slots = sums.twice ? 2 * (world - 1) : world;
    const std::uint64_t needed = slots * slot_bytes(world, sums);
    if (world > 1 && needed > kMailBytes) {
        throw std::length_error("the ranks send " + std::to_string(needed) +
                                " bytes; a call by mail may have " + std::to_string(kMailBytes));
    }
    if (sums.norm.weight != nullptr && sums.columns > kMostNormedColumns) {
        throw std::length_error("rows of " + std::to_string(sums.columns) +
                                " columns; a call by mail normalises at most " +
                                std::to_string(kMostNormedColumns));
    }
}

void sum_rows(const Workspace& workspace, const transport::WaitLimits& limits,
              const RowsOfSums& given, cudaStream_t stream) {
    const int world = workspace.world;
    const bool norm = given.norm.weight != nullptr;
    check(given);
    const RowsOfSums sums = norm ? given : in_shorter_rows(given);
    check_sum_rows(world, sums);
    if (sums.twice && !norm) throw std::invalid_argument("two exchanges of rows without a norm");
    if (sums.unrounded && (sums.twice || !norm)) {
        throw std::invalid_argument("float32 terms without a norm, or in two exchanges");
    }
    if (sums.tree && (sums.twice || sums.unrounded || (world & (world - 1)) != 0)) {
        throw std::invalid_argument("a tree of float32 terms, in two exchanges, or of " +
                                    std::to_string(world) + " ranks; expected a power of two");
    }
    if (sums.rows == 0) return;
    const Args args{workspace, limits, sums, owned_rows(world, sums), slot_bytes(world, sums)};
    const std::uint32_t element = norm ? sizeof(float) : 0;
    start("launching sum_rows",
          sums.half ? kernel_of<__half>(sums) : kernel_of<__nv_bfloat16>(sums), args, sums,
          sums.twice ? args.owned : sums.rows, 1, element * kMostNormedColumns,
          element * sums.columns, stream);
}

void norm_rows(const RowsOfSums& sums, cudaStream_t stream) {
    check(sums);
    if (sums.norm.weight == nullptr) throw std::invalid_argument("norm_rows without a norm");
    if (sums.rows == 0) return;
    auto* const kernel =
        sums.half ? norm_kernel_of<__half>(sums) : norm_kernel_of<__nv_bfloat16>(sums);
    start("launching norm_rows", kernel, sums, sums, sums.rows, are_short(sums) ? 2 : 1, 0, 0,
          stream);
}

}  // namespace mkernel::cuda
