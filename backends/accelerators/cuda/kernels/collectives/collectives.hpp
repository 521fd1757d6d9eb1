// Collectives without a fused product: they run beside a library's matrix product where fusing does not pay,
// mostly for small sizes. They use no NCCL, no multicast, and no host on the way.
//
// Everything is a push. A rank stores its bytes straight into a slot of each peer's workspace, chunk by
// chunk, raises the chunk's flag there, and consumes its own slots as their flags come:
//   all_gather      src ──▶ slot [rank] of every peer ──▶ its out. Or straight into every rank's out,
//                   where that is symmetric memory: one pass less, one hand-shake more. A second, small
//                   array may go beside the first (scales of rows)
//   reduce_scatter  part p of src ──▶ slot [rank] of rank p ──▶ summed there into its out
//   all_reduce      small: src ──▶ slot [rank] of every peer ──▶ every rank sums all of it
//                   large: reduce_scatter, and every summed chunk ──▶ every peer's out, where that is
//                   symmetric or its rank publishes where it is (device/landing.cuh), or a second set of
//                   slots and then its out
//
// Sums are float32, rounded once, in a fixed order: the owner's own elements, then those of ranks
// owner + 1, owner + 2, ... modulo the world, then the bias. Every element has one owner, whichever way is taken,
// so results do not depend on timing, grid or size class, and are the same bits on all ranks. With more than two ranks
// they do depend on the place of an element; by the `tree` they do not.
//
// Reuse. Small calls into private outs are brief (device/call.cuh), and the others end on a rank only
// when all peers have ended them: slots and flags are free for the next call. `src` and `out` are
// private, except symmetric outs, which are written only after their owner has announced that it is in this
// call.
//
// Flags are set to the epoch, one writer each: chunk * world + rank, and for an all_reduce's second
// exchange the same after all of the first. Data that goes straight into a symmetric out needs no flag: the
// end of the call signals that it has arrived.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/landing.cuh"
#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/accelerators/cuda/kernels/prefetch.hpp"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda::collectives {

// The elements that are added up. Results are 16-bit; sources that must not be rounded twice are float32.
enum class Element : std::uint32_t { bfloat16, float16, float32_to_bfloat16, float32_to_float16 };

inline bool from_float32(Element element) {
    return element == Element::float32_to_bfloat16 || element == Element::float32_to_float16;
}

inline std::uint64_t source_bytes(Element element) {
    return from_float32(element) ? 4 : 2;
}

// One call on one rank. Calls of a workspace run one after another on each rank, the same calls with
// the same sizes, `staging` and ways on all ranks.
struct Collective {
    Workspace workspace;
    transport::WaitLimits limits;
    std::uint64_t staging = 0;        // where its slots lie in the data area; a multiple of 16
    std::uint64_t staging_bytes = 0;  // how many bytes they may take
    std::uint32_t blocks = 0;         // at most; 0: two a multiprocessor. May differ between ranks
    // Exchanges by mail, as mail.hpp describes: for small calls. A two-shot call into symmetric
    // outs goes by flags all the same.
    bool by_mail = false;
    // Of invariant results: terms are added by the tree (ordered_sum.cuh), ranks and 16-bit terms alone, not by one
    // shot with flags or by two exchanges of mail.
    bool tree = false;
    // The landings of a two-shot all_reduce into an out that is not symmetric, neither brief nor by mail.
    Landings landings{};
    Prefetch prefetch{};  // of an all_reduce by mail; others ignore it
};

// `at[rank]` is this rank's own. `symmetric`: at[p] is rank p's, mapped here; else only at[rank] is
// set.
struct Outs {
    void* at[kMaxRanks] = {};
    bool symmetric = false;
};

enum class Way : std::uint32_t { one_shot, two_shot };

// The bias added to every row of a result [.., columns], in float32 before it is rounded. Aligned to 16
// bytes, as many elements of the result's type as a row has: a multiple of 8.
struct Bias {
    const void* row = nullptr;  // null: none
    std::uint32_t columns = 0;
};

// A second array that a gather carries beside its bytes: `bytes` of each rank, in order, to a private `out`.
struct Beside {
    const void* src = nullptr;
    std::uint64_t bytes = 0;  // 0: nothing
    void* out = nullptr;
};

// Returns the bytes of staging that a call needs, the same on all ranks.
std::uint64_t all_gather_staging(int world, std::uint64_t shard_bytes, bool symmetric,
                                 std::uint64_t beside_bytes = 0);
std::uint64_t reduce_scatter_staging(int world, Element element, std::uint64_t part_elements);
std::uint64_t all_reduce_staging(int world, Element element, std::uint64_t elements, Way way,
                                 bool symmetric);

// Sets out [world * shard_bytes] of every rank to the ranks' src [shard_bytes] in order. Nothing goes beside
// symmetric outs.
void all_gather(const Collective& call, const void* src, std::uint64_t shard_bytes, const Outs& out,
                cudaStream_t stream, const Beside& beside = {});

// Sets out [part_elements] of rank r to the sum over ranks of part r of their src [world * part_elements],
// whole rows where there is a bias.
void reduce_scatter(const Collective& call, Element element, const void* src,
                    std::uint64_t part_elements, void* out, const Bias& bias, cudaStream_t stream);

// Sets out [elements] of every rank to the sum over ranks of their src [elements]. Symmetric outs serve the
// two-shot way only. Every rank gives the same values of a bias: each adds it to what it sums.
void all_reduce(const Collective& call, Element element, const void* src, std::uint64_t elements,
                const Outs& out, Way way, const Bias& bias, cudaStream_t stream);

// All of them are stream-ordered on the current device's `stream`, and may be captured. Any size; addresses
// aligned to the element (16 bytes and whole 16 bytes a part are fast). `src` and `out` must not overlap,
// except those of a two-shot all_reduce, which may be one: a chunk of it is written when what was there has
// been sent and added up. std::invalid_argument; CudaError.

}  // namespace mkernel::cuda::collectives
