// The kernels of mail.hpp and their launches.
//
// `kWhole`: this rank's addresses are multiples of 16, and its arrays whole vectors. A kernel is small then,
// which matters: fetching instructions takes as long as an exchange of few bytes. Ranks need not be alike.
#include "backends/accelerators/cuda/kernels/collectives/mail.hpp"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/device/mailbox.cuh"
#include "backends/accelerators/cuda/device/prefetch.cuh"
#include "backends/accelerators/cuda/kernels/collectives/launch.cuh"
#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"

namespace mkernel::cuda::collectives {
namespace {

constexpr unsigned kMailThreads = 256;  // that send and take
// A warp more counts the block (BriefBlock) and prefetches: neither its fence nor an answer delays what is sent.
constexpr unsigned kBlockThreads = kMailThreads + 32;

// Places of 16 bytes, or of 8 elements, are counted with 32 bits: kMailBytes holds fewer.
struct Sent {
    Workspace workspace;
    transport::WaitLimits limits;
    std::uint64_t slot;  // bytes of mail from one rank

    __device__ int after(int rank, int step) const {
        const int next = rank + step;
        return next < workspace.world ? next : next - workspace.world;
    }
    __device__ int peer(int step) const { return after(workspace.rank, step); }
    // Returns the place at rank `at` of what rank `from` sends.
    __device__ char* mail(int at, int from, std::uint64_t epoch) const {
        return workspace.mail(at, epoch) + from * slot;
    }
    __device__ transport::DeviceWaiter waiter() const {
        return waiter_of(workspace, limits, transport::Waiter::comm_kernel);
    }
};

// Returns the first of a thread's own places; of a thread without any, one behind all.
__device__ std::uint32_t first_place() {
    return threadIdx.x < kMailThreads ? blockIdx.x * kMailThreads + threadIdx.x : ~0u;
}

// Calls `each` for a thread's own share of so many places; it stops where `each` returns false.
template <class Each>
__device__ void for_own(std::uint32_t places, Each&& each) {
#pragma unroll 1
    for (std::uint32_t place = first_place(); place < places; place += gridDim.x * kMailThreads) {
        if (!each(place)) return;
    }
}

__device__ transport::Awaited mail_of(int from, std::uint32_t place) {
    return {transport::kMail, static_cast<std::uint32_t>(from), place / kMailThreads};
}

// Loads vectors of T from `from`, of which `count` elements are there; the rest is zero.
template <bool kWhole, class Vectors, class T>
__device__ Vectors load(const T* from, std::uint64_t count) {
    Vectors found{};
    if constexpr (kWhole) {
        auto* words = reinterpret_cast<uint4*>(&found);
#pragma unroll
        for (unsigned i = 0; i < sizeof(Vectors) / 16; ++i) {
            words[i] = ptx::load_16(reinterpret_cast<const char*>(from) + i * 16);
        }
    } else {
        T* elements = reinterpret_cast<T*>(&found);
#pragma unroll
        for (unsigned i = 0; i < sizeof(Vectors) / sizeof(T); ++i) {
            if (i < count) elements[i] = from[i];
        }
    }
    return found;
}

template <bool kWhole, class T>
__device__ void store(T* to, std::uint64_t count, uint4 words) {
    if constexpr (kWhole) {
        ptx::store_16(to, words);
    } else {
        const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
        for (unsigned i = 0; i < 16 / sizeof(T); ++i) {
            if (i < count) to[i] = elements[i];
        }
    }
}

struct Gathered {
    Sent sent;
    // Two arrays: this rank's, everybody's, and a rank's bytes; the second one may have none.
    const char* src[2];
    char* out[2];
    std::uint64_t bytes[2];
    std::uint32_t places[2];
};

template <bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, 2)
    mail_all_gather_kernel(const __grid_constant__ Gathered args) {
    const Sent& sent = args.sent;
    const int rank = sent.workspace.rank;
    ptx::wait_for_grid_before();
    const std::uint32_t places = args.places[0] + args.places[1];
    // Returns which array a place is in, and how many bytes into a rank's part of it.
    const auto at = [&](std::uint32_t place, int& which) {
        which = place < args.places[0] ? 0 : 1;
        return (place - which * args.places[0]) * std::uint64_t{16};
    };
    const auto own = [&](std::uint32_t place) {
        int which;
        const std::uint64_t begin = at(place, which);
        return load<kWhole, uint4>(args.src[which] + begin, args.bytes[which] - begin);
    };
    const std::uint32_t first = first_place();
    uint4 early{};  // the thread's first words, which come beside the epoch
    if (first < places) early = own(first);
    const BriefBlock brief(sent.workspace);
    const std::uint64_t epoch = brief.epoch();
    const auto mail = [&](int at, int from, std::uint32_t place) -> mailbox::Exact {
        char* const slot = sent.mail(at, from, epoch);
        return {slot + std::uint64_t{place} * 16, slot + std::uint64_t{places} * 16 + place};
    };
    const auto keep = [&](int from, std::uint32_t place, uint4 words) {
        int which;
        const std::uint64_t begin = at(place, which);
        const std::uint64_t nbytes = args.bytes[which];
        store<kWhole>(args.out[which] + from * nbytes + begin, nbytes - begin, words);
    };
    for_own(places, [&](std::uint32_t place) {
        const uint4 words = place == first ? early : own(place);
#pragma unroll 1
        for (int step = 1; step < sent.workspace.world; ++step) {
            mailbox::send_exactly(mail(sent.peer(step), rank, place), words);
        }
        keep(rank, place, words);
        return true;
    });
    brief.move_on(sent.workspace);
    const auto waiter = sent.waiter();
    for_own(places, [&](std::uint32_t place) {
#pragma unroll 1
        for (int step = 1; step < sent.workspace.world; ++step) {
            const int from = sent.peer(step);
            const mailbox::Exact come = mail(rank, from, place);
            uint4 words;
            if (!mailbox::take_exactly(come, words, waiter, mail_of(from, place))) return false;
            keep(from, place, words);
        }
        return true;
    });
}

struct Reduced {
    Sent sent;
    const void* src;
    void* out;
    std::uint32_t elements;  // of the result
    std::uint32_t owned;     // elements of each rank but perhaps the last ones
    Bias bias;
    Prefetch prefetch;  // of an all_reduce
};

template <class In>
__device__ void send(char* to, const Eight<In>& eight) {
#pragma unroll
    for (int i = 0; i < Eight<In>::kVectors; ++i) {
        mailbox::send(to + i * 16, mailbox::mailable(eight.v[i]));
    }
}

template <class In>
__device__ bool take(char* from, Eight<In>& eight, const transport::DeviceWaiter& waiter,
                     transport::Awaited what) {
    char* at[Eight<In>::kVectors];
#pragma unroll
    for (int i = 0; i < Eight<In>::kVectors; ++i) at[i] = from + i * 16;
    return mailbox::take(at, eight.v, waiter, what);
}

template <class In, class Out, bool kScatter, bool kWhole, bool kTree>
__global__ void __launch_bounds__(kBlockThreads, 2)
    mail_reduce_kernel(const __grid_constant__ Reduced args) {
    const Sent& sent = args.sent;
    const int rank = sent.workspace.rank;
    const int world = sent.workspace.world;
    ptx::wait_for_grid_before();
    const auto own = [&](std::uint32_t place, int of) {
        const std::uint32_t at = place * 8;
        const In* const part =
            static_cast<const In*>(args.src) + (kScatter ? std::uint64_t{args.elements} * of : 0);
        return load<kWhole, Eight<In>>(part + at, args.elements - at);
    };
    const std::uint32_t places = (args.elements + 7) / 8;
    const std::uint32_t first = first_place();
    Eight<In> early{};  // the thread's first terms, which come beside the epoch
    if (first < places) early = own(first, sent.peer(1));
    const BriefBlock brief(sent.workspace, args.prefetch.exchange);
    const std::uint64_t epoch = brief.epoch();
    for_own(places, [&](std::uint32_t place) {
        Eight<In> eight = place == first ? early : own(place, sent.peer(1));
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            const int to = sent.peer(step);
            if (kScatter && step > 1) eight = own(place, to);
            send(sent.mail(to, rank, epoch) + place * sizeof(eight), eight);
        }
        return true;
    });
    brief.move_on(sent.workspace);
    if (!kScatter && threadIdx.x == blockDim.x - 1) prefetch_share(args.prefetch);
    const auto waiter = sent.waiter();
    for_own(places, [&](std::uint32_t place) {
        const int owner = kScatter ? rank : static_cast<int>(place * 8 / args.owned);
        const Eight<In> mine = own(place, rank);
        TreeOr<kTree, In, Sum8<Out>> terms;
#pragma unroll 1
        for (int step = 0; step < world; ++step) {
            const int from = kTree ? step : sent.after(owner, step);
            Eight<In> theirs = mine;
            char* const at = sent.mail(rank, from, epoch) + place * sizeof(theirs);
            if (from != rank && !take(at, theirs, waiter, mail_of(from, place))) return false;
            terms.add(theirs);
        }
        Sum8<Out> sum = total<Out>(terms);
        if (args.bias.row != nullptr) {
            const std::uint32_t first = (kScatter ? rank * args.elements : 0) + place * 8;
            Eight<Out> more;
            more.load(reinterpret_cast<const char*>(static_cast<const Out*>(args.bias.row) +
                                                    first % args.bias.columns));
            sum.add(more);
        }
        Out* const to = static_cast<Out*>(args.out) + place * 8;
        store<kWhole>(to, args.elements - place * 8, sum.rounded());
        return true;
    });
}

// In each of two exchanges a rank has a place for every peer: what rank r sends to the rank `step` after it
// is that rank's slot `step` - 1, and comes from the rank `world` - `step` after it.
struct Twice {
    Workspace workspace;
    transport::WaitLimits limits;
    const void* src;
    void* out;
    std::uint32_t elements;
    std::uint32_t owned;  // elements of each rank but perhaps the last ones, a multiple of 8
    std::uint64_t slot;   // bytes of mail from one rank, to be summed
    std::uint64_t sums;   // where mail with sums begins
    std::uint64_t sums_slot;
    Bias bias;
    Prefetch prefetch;

    __device__ int peer(int step) const {
        const int next = workspace.rank + step;
        return next < workspace.world ? next : next - workspace.world;
    }
    __device__ std::uint32_t begin(int part) const { return min(part * owned, elements); }
    __device__ std::uint32_t count(int part) const { return min(owned, elements - begin(part)); }
    __device__ char* to_sum(int at, int step, std::uint64_t epoch) const {
        return workspace.mail(at, epoch) + (step - 1) * slot;
    }
    __device__ char* summed(int at, int step, std::uint64_t epoch) const {
        return workspace.mail(at, epoch) + sums + (step - 1) * sums_slot;
    }
};

// A place is 8 elements of every part, handled by one thread from its first word to its last: so `out` may be
// `src`.
template <class In, class Out, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, 2)
    mail_all_reduce_twice_kernel(const __grid_constant__ Twice args) {
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const In* const src = static_cast<const In*>(args.src);
    Out* const out = static_cast<Out*>(args.out);
    ptx::wait_for_grid_before();
    const BriefBlock brief(args.workspace, args.prefetch.exchange);
    const std::uint64_t epoch = brief.epoch();
    const std::uint32_t places = args.owned / 8;
    for_own(places, [&](std::uint32_t place) {
        const std::uint32_t at = place * 8;
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            const int to = args.peer(step);
            const std::uint32_t count = args.count(to);
            if (at >= count) continue;
            const auto eight = load<kWhole, Eight<In>>(src + args.begin(to) + at, count - at);
            send(args.to_sum(to, step, epoch) + place * sizeof(eight), eight);
        }
        return true;
    });
    brief.move_on(args.workspace);
    if (threadIdx.x == blockDim.x - 1) prefetch_share(args.prefetch);
    const transport::DeviceWaiter waiter =
        waiter_of(args.workspace, args.limits, transport::Waiter::comm_kernel);
    const std::uint32_t first = args.begin(rank);
    const std::uint32_t own = args.count(rank);
    for_own((own + 7) / 8, [&](std::uint32_t place) {
        const std::uint32_t at = place * 8;
        Sum8<Out> sum;
        sum.add(load<kWhole, Eight<In>>(src + first + at, own - at));
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            Eight<In> theirs;
            char* const mail = args.to_sum(rank, world - step, epoch) + place * sizeof(theirs);
            if (!take(mail, theirs, waiter, mail_of(args.peer(step), place))) return false;
            sum.add(theirs);
        }
        if (args.bias.row != nullptr) {
            Eight<Out> more;
            more.load(reinterpret_cast<const char*>(static_cast<const Out*>(args.bias.row) +
                                                    (first + at) % args.bias.columns));
            sum.add(more);
        }
        const uint4 rounded = mailbox::sendable(sum.rounded());
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            mailbox::send_rounded(args.summed(args.peer(step), step, epoch) + place * 16, rounded);
        }
        store<kWhole>(out + first + at, own - at, rounded);
        return true;
    });
    for_own(places, [&](std::uint32_t place) {
        const std::uint32_t at = place * 8;
#pragma unroll 1
        for (int step = 1; step < world; ++step) {
            const int from = args.peer(step);
            const std::uint32_t count = args.count(from);
            if (at >= count) continue;
            char* const mail[] = {args.summed(rank, world - step, epoch) + place * 16};
            uint4 words[1];
            if (!mailbox::take_rounded(mail, words, waiter, mail_of(from, place))) return false;
            store<kWhole>(out + args.begin(from) + at, count - at, words[0]);
        }
        return true;
    });
}

// Returns true where all of them are multiples of 16: addresses, and bytes.
bool whole(std::initializer_list<const void*> addresses,
           std::initializer_list<std::uint64_t> bytes) {
    std::uint64_t bits = 0;
    for (const void* at : addresses) bits |= reinterpret_cast<std::uintptr_t>(at);
    for (const std::uint64_t count : bytes) bits |= count;
    return bits % 16 == 0;
}

std::uint64_t slot_of(std::uint64_t nbytes) {
    return (nbytes + 127) / 128 * 128;
}

void check_mail(std::uint64_t needed) {
    if (needed <= kMailBytes) return;
    throw std::invalid_argument("the ranks send " + std::to_string(needed) +
                                " bytes; a call by mail may have " + std::to_string(kMailBytes));
}

// `nbytes`: of mail from one rank.
Sent sent(const Collective& call, std::uint64_t nbytes) {
    const std::uint64_t slot = slot_of(nbytes);
    check_mail(call.workspace.world * slot);
    return {call.workspace, call.limits, slot};
}

template <class Args>
void launch(void (*kernel)(Args), Args args, const Collective& call, std::uint32_t places,
            cudaStream_t stream) {
    const std::uint32_t most = most_blocks(call);
    std::uint32_t blocks = std::min((places + kMailThreads - 1) / kMailThreads, most);
    if constexpr (requires { args.prefetch; }) blocks = args.prefetch.blocks_beside(blocks, most);
    launch_early(kernel, args, blocks, kBlockThreads, stream);
}

template <bool kScatter>
void reduce(const Collective& call, Element element, const void* src, std::uint64_t elements,
            std::uint64_t owned, void* out, const Bias& bias, cudaStream_t stream) {
    const std::uint64_t places = (elements + 7) / 8;
    const Reduced args{.sent = sent(call, places * 8 * source_bytes(element)),
                       .src = src,
                       .out = out,
                       .elements = static_cast<std::uint32_t>(elements),
                       .owned = static_cast<std::uint32_t>(owned),
                       .bias = bias,
                       .prefetch = kScatter ? Prefetch{} : call.prefetch};
    const bool vectors = whole({src, out}, {elements * kResultBytes});
    const auto kernel = of_element<void (*)(Reduced)>(element, [&](auto source, auto result) {
        using In = decltype(source);
        using Out = decltype(result);
        if constexpr (sizeof(In) == sizeof(Out)) {
            if (call.tree) {
                return vectors ? &mail_reduce_kernel<In, Out, kScatter, true, true>
                               : &mail_reduce_kernel<In, Out, kScatter, false, true>;
            }
        }
        return vectors ? &mail_reduce_kernel<In, Out, kScatter, true, false>
                       : &mail_reduce_kernel<In, Out, kScatter, false, false>;
    });
    launch(kernel, args, call, static_cast<std::uint32_t>(places), stream);
}

}  // namespace

void all_gather_by_mail(const Collective& call, const void* src, std::uint64_t shard_bytes,
                        void* out, cudaStream_t stream, const Beside& beside) {
    const std::uint64_t places[2] = {(shard_bytes + 15) / 16, (beside.bytes + 15) / 16};
    const Gathered args{
        .sent = sent(call, (places[0] + places[1]) * 17),
        .src = {static_cast<const char*>(src), static_cast<const char*>(beside.src)},
        .out = {static_cast<char*>(out), static_cast<char*>(beside.out)},
        .bytes = {shard_bytes, beside.bytes},
        .places = {static_cast<std::uint32_t>(places[0]), static_cast<std::uint32_t>(places[1])}};
    const bool vectors = whole({src, out, beside.src, beside.out}, {shard_bytes, beside.bytes});
    launch(vectors ? &mail_all_gather_kernel<true> : &mail_all_gather_kernel<false>, args, call,
           args.places[0] + args.places[1], stream);
}

void reduce_scatter_by_mail(const Collective& call, Element element, const void* src,
                            std::uint64_t part_elements, void* out, const Bias& bias,
                            cudaStream_t stream) {
    reduce<true>(call, element, src, part_elements, part_elements, out, bias, stream);
}

void all_reduce_by_mail(const Collective& call, Element element, const void* src,
                        std::uint64_t elements, std::uint64_t owned, void* out, const Bias& bias,
                        cudaStream_t stream) {
    reduce<false>(call, element, src, elements, owned, out, bias, stream);
}

void all_reduce_twice_by_mail(const Collective& call, Element element, const void* src,
                              std::uint64_t elements, std::uint64_t owned, void* out,
                              const Bias& bias, cudaStream_t stream) {
    const auto peers = static_cast<std::uint64_t>(call.workspace.world - 1);
    const std::uint64_t slot = slot_of(owned * source_bytes(element));
    const std::uint64_t sums_slot = slot_of(owned * kResultBytes);
    check_mail(peers * (slot + sums_slot));
    const Twice args{.workspace = call.workspace,
                     .limits = call.limits,
                     .src = src,
                     .out = out,
                     .elements = static_cast<std::uint32_t>(elements),
                     .owned = static_cast<std::uint32_t>(owned),
                     .slot = slot,
                     .sums = peers * slot,
                     .sums_slot = sums_slot,
                     .bias = bias,
                     .prefetch = call.prefetch};
    const bool vectors = whole({src, out}, {elements * kResultBytes});
    const auto kernel = of_element<void (*)(Twice)>(element, [&](auto source, auto result) {
        using In = decltype(source);
        using Out = decltype(result);
        return vectors ? &mail_all_reduce_twice_kernel<In, Out, true>
                       : &mail_all_reduce_twice_kernel<In, Out, false>;
    });
    launch(kernel, args, call, args.owned / 8, stream);
}

}  // namespace mkernel::cuda::collectives
