// The collectives of few bytes (collectives.hpp), with mail (device/mailbox.cuh) for slots and flags: a word
// stored at a peer shows by itself that it has arrived, so neither a fence nor a flag follows it, and no rank
// waits for a whole chunk.
//
//   all_gather      src ──▶ the mail of every peer ──▶ its out. Any bits: a byte beside 16 others marks
//                   which of their words are zero
//   reduce_scatter  part p of src ──▶ the mail of rank p ──▶ summed there into its out
//   all_reduce      one-shot: src ──▶ the mail of every peer ──▶ every rank sums all of it
//                   two-shot: part p of src ──▶ the mail of rank p ──▶ summed there into its out, and each sum
//                   at once ──▶ the mail of every peer ──▶ its out. One kernel, and one call: a thread sends sums
//                   of what has come while others wait
//
// Sums, and so their bits, are those of the other kernels. All calls are brief (device/call.cuh): each rank
// waits for something of every peer (of two exchanges, perhaps through an owner who did), and for all that
// peers write into its memory. A thread sends everything that it has to send before it waits, except sums,
// which it sends once their terms have arrived; which thread takes which place differs between grids alone.
// So no rank waits for ever while every block of its grid finds a place, of which there are at most two a
// multiprocessor.
#pragma once

#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"

namespace mkernel::cuda::collectives {

// The functions do what their namesakes of collectives.hpp do: after the same checks, with no symmetric outs,
// with more than one rank and something to send. std::invalid_argument where what the ranks send is more mail
// than a call may have.
void all_gather_by_mail(const Collective& call, const void* src, std::uint64_t shard_bytes,
                        void* out, cudaStream_t stream, const Beside& beside);
void reduce_scatter_by_mail(const Collective& call, Element element, const void* src,
                            std::uint64_t part_elements, void* out, const Bias& bias,
                            cudaStream_t stream);
// `owned`: elements of each rank but perhaps the last ones, a multiple of 8.
void all_reduce_by_mail(const Collective& call, Element element, const void* src,
                        std::uint64_t elements, std::uint64_t owned, void* out, const Bias& bias,
                        cudaStream_t stream);
// Takes the two-shot way. `src` and `out` may be one.
void all_reduce_twice_by_mail(const Collective& call, Element element, const void* src,
                              std::uint64_t elements, std::uint64_t owned, void* out,
                              const Bias& bias, cudaStream_t stream);

}  // namespace mkernel::cuda::collectives
