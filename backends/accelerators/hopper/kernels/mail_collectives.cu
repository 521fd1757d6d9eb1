// The kernels of mail_collectives.hpp and their launches.
#include "backends/accelerators/hopper/kernels/mail_collectives.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/device/mailbox.cuh"
#include "backends/accelerators/hopper/kernels/collective_launch.cuh"
#include "backends/accelerators/hopper/kernels/ordered_sum.cuh"

namespace mkernel::hopper::collectives {
namespace {

constexpr int kThreadsOfMail = 256;

struct Sent {
    Workspace workspace;
    transport::WaitLimits limits;
    std::uint64_t slot;  // bytes of mail from one rank

    __device__ int peer(int step) const { return (workspace.rank + step) % workspace.world; }
    // Where at rank `at` lies what rank `from` sends.
    __device__ char* mail(int at, int from, std::uint64_t epoch) const {
        return workspace.mail(at, epoch) + from * slot;
    }
};

// The call's number, once this thread may read what the grid before wrote, and send.
__device__ std::uint64_t begin(const Workspace& workspace) {
    constexpr unsigned kWhoCounts = 32;  // none of the warp that reads: nobody waits for it
    __shared__ std::uint64_t of_block;
    ptx::wait_for_grid_before();
    if (threadIdx.x == 0) of_block = workspace.control().state.epoch;
    mailbox::open();
    __syncthreads();
    const std::uint64_t epoch = of_block;
    if (threadIdx.x == kWhoCounts) finish_brief_call(workspace, epoch);
    return epoch;
}

// What thread `i` of the grid has: i, i + all threads, ...
template <class Each>
__device__ void for_own(std::uint64_t count, Each&& each) {
    const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreadsOfMail;
    for (std::uint64_t i = std::uint64_t{blockIdx.x} * kThreadsOfMail + threadIdx.x; i < count;
         i += threads) {
        if (!each(i)) return;
    }
}

__device__ transport::Awaited mail_of(int from, std::uint64_t place) {
    return {transport::kMail, static_cast<std::uint32_t>(from),
            static_cast<std::uint32_t>(place / kThreadsOfMail)};
}

// `count` elements at `from`, all of `kCount` or as many as there are; the rest is zero.
template <class Vectors, class T>
__device__ Vectors load_some(const T* from, std::uint64_t count) {
    constexpr std::uint64_t kCount = sizeof(Vectors) / sizeof(T);
    Vectors found{};
    if (count >= kCount && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
        auto* words = reinterpret_cast<uint4*>(&found);
#pragma unroll
        for (unsigned i = 0; i < sizeof(Vectors) / 16; ++i) {
            words[i] = ptx::load_16(reinterpret_cast<const char*>(from) + i * 16);
        }
        return found;
    }
    T* elements = reinterpret_cast<T*>(&found);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
        if (i < count) elements[i] = from[i];
    }
    return found;
}

template <class T>
__device__ void store_some(T* to, std::uint64_t count, uint4 words) {
    constexpr std::uint64_t kCount = 16 / sizeof(T);
    if (count >= kCount && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
        ptx::store_16(to, words);
        return;
    }
    const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
        if (i < count) to[i] = elements[i];
    }
}

struct Gathered {
    Sent sent;
    // Of two arrays: this rank's, everybody's, and a rank's bytes; the second one may have none.
    const char* src[2];
    char* out[2];
    std::uint64_t bytes[2];
    std::uint64_t places[2];  // of 16 bytes
};

__global__ void __launch_bounds__(kThreadsOfMail, 2)
    all_gather_kernel(const __grid_constant__ Gathered args) {
    const Sent& sent = args.sent;
    const int rank = sent.workspace.rank;
    const std::uint64_t epoch = begin(sent.workspace);
    const auto waiter = waiter_of(sent.workspace, sent.limits, transport::Waiter::comm_kernel);
    const std::uint64_t places = args.places[0] + args.places[1];
    const auto mail = [&](int at, int from, std::uint64_t place) -> mailbox::Exact {
        char* const slot = sent.mail(at, from, epoch);
        return {slot + place * 16, slot + places * 16 + place};
    };
    const auto store = [&](int from, std::uint64_t place, uint4 words) {
        const int which = place < args.places[0] ? 0 : 1;
        const std::uint64_t at = (place - which * args.places[0]) * 16;
        store_some(args.out[which] + from * args.bytes[which] + at, args.bytes[which] - at, words);
    };
    for_own(places, [&](std::uint64_t place) {
        const int which = place < args.places[0] ? 0 : 1;
        const std::uint64_t at = (place - which * args.places[0]) * 16;
        const auto own = load_some<uint4>(args.src[which] + at, args.bytes[which] - at);
        for (int step = 1; step < sent.workspace.world; ++step) {
            mailbox::send_exactly(mail(sent.peer(step), rank, place), own);
        }
        store(rank, place, own);
        return true;
    });
    for_own(places, [&](std::uint64_t place) {
        for (int step = 1; step < sent.workspace.world; ++step) {
            const int from = sent.peer(step);
            uint4 words;
            if (!mailbox::take_exactly(mail(rank, from, place), words, waiter,
                                       mail_of(from, place))) {
                return false;
            }
            store(from, place, words);
        }
        return true;
    });
}

struct Reduced {
    Sent sent;
    const void* src;
    void* out;
    std::uint64_t elements;  // of the result
    std::uint64_t owned;     // elements of each rank but perhaps the last ones
    Bias bias;
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

template <class In, class Out, bool kScatter>
__global__ void __launch_bounds__(kThreadsOfMail, 2)
    reduce_kernel(const __grid_constant__ Reduced args) {
    const Sent& sent = args.sent;
    const int rank = sent.workspace.rank;
    const int world = sent.workspace.world;
    const std::uint64_t epoch = begin(sent.workspace);
    const auto waiter = waiter_of(sent.workspace, sent.limits, transport::Waiter::comm_kernel);
    const auto* src = static_cast<const In*>(args.src);
    const auto own = [&](std::uint64_t place, int of) {
        const std::uint64_t at = place * 8;
        return load_some<Eight<In>>(src + (kScatter ? of * args.elements : 0) + at,
                                    args.elements - at);
    };
    const std::uint64_t places = (args.elements + 7) / 8;
    for_own(places, [&](std::uint64_t place) {
        Eight<In> eight = own(place, sent.peer(1));
        for (int step = 1; step < world; ++step) {
            const int to = sent.peer(step);
            if (kScatter && step > 1) eight = own(place, to);
            send(sent.mail(to, rank, epoch) + place * sizeof(eight), eight);
        }
        return true;
    });
    for_own(places, [&](std::uint64_t place) {
        const int owner = kScatter ? rank : static_cast<int>(place * 8 / args.owned);
        const Eight<In> mine = own(place, rank);
        Sum8<Out> sum;
        for (int step = 0; step < world; ++step) {
            const int from = (owner + step) % world;
            if (from == rank) {
                sum.add(mine);
                continue;
            }
            Eight<In> theirs;
            char* const at = sent.mail(rank, from, epoch) + place * sizeof(theirs);
            if (!take(at, theirs, waiter, mail_of(from, place))) return false;
            sum.add(theirs);
        }
        if (args.bias.row != nullptr) {
            Eight<Out> more;
            const std::uint64_t first = (kScatter ? rank * args.elements : 0) + place * 8;
            more.load(reinterpret_cast<const char*>(static_cast<const Out*>(args.bias.row) +
                                                    first % args.bias.columns));
            sum.add(more);
        }
        store_some(static_cast<Out*>(args.out) + place * 8, args.elements - place * 8,
                   sum.rounded());
        return true;
    });
}

template <class Args>
void launch(void (*kernel)(Args), Args args, const Collective& call, std::uint64_t slot,
            std::uint64_t places, cudaStream_t stream) {
    const int world = call.workspace.world;
    args.sent = {call.workspace, call.limits, (slot + 127) / 128 * 128};
    const std::uint64_t needed = world * args.sent.slot;
    if (needed > kMailBytes) {
        throw std::invalid_argument("the ranks send " + std::to_string(needed) +
                                    " bytes; a call by mail may have " +
                                    std::to_string(kMailBytes));
    }
    const std::uint64_t wanted = (places + kThreadsOfMail - 1) / kThreadsOfMail;
    launch_early(kernel, args,
                 static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, most_blocks(call))),
                 kThreadsOfMail, stream);
}

template <bool kScatter>
void reduce(const Collective& call, Element element, const Reduced& args, cudaStream_t stream) {
    const auto kernel = of_element<void (*)(Reduced)>(element, [](auto source, auto result) {
        return &reduce_kernel<decltype(source), decltype(result), kScatter>;
    });
    const std::uint64_t places = (args.elements + 7) / 8;
    launch(kernel, args, call, places * 8 * source_bytes(element), places, stream);
}

}  // namespace

void all_gather_by_mail(const Collective& call, const void* src, std::uint64_t shard_bytes,
                        void* out, cudaStream_t stream, const Beside& beside) {
    Gathered args{};
    args.src[0] = static_cast<const char*>(src);
    args.src[1] = static_cast<const char*>(beside.src);
    args.out[0] = static_cast<char*>(out);
    args.out[1] = static_cast<char*>(beside.out);
    args.bytes[0] = shard_bytes;
    args.bytes[1] = beside.bytes;
    for (int i = 0; i < 2; ++i) args.places[i] = (args.bytes[i] + 15) / 16;
    const std::uint64_t places = args.places[0] + args.places[1];
    launch(&all_gather_kernel, args, call, places * 17, places, stream);
}

void reduce_scatter_by_mail(const Collective& call, Element element, const void* src,
                            std::uint64_t part_elements, void* out, const Bias& bias,
                            cudaStream_t stream) {
    reduce<true>(call, element, {{}, src, out, part_elements, part_elements, bias}, stream);
}

void all_reduce_by_mail(const Collective& call, Element element, const void* src,
                        std::uint64_t elements, std::uint64_t owned, void* out, const Bias& bias,
                        cudaStream_t stream) {
    reduce<false>(call, element, {{}, src, out, elements, owned, bias}, stream);
}

}  // namespace mkernel::hopper::collectives
