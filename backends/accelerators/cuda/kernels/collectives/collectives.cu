// The kernels of collectives.hpp and their launches.
#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/kernels/collectives/exchange.cuh"
#include "backends/accelerators/cuda/kernels/collectives/launch.cuh"
#include "backends/accelerators/cuda/kernels/collectives/mail.hpp"
#include "backends/accelerators/cuda/kernels/collectives/ordered_sum.cuh"

namespace mkernel::cuda::collectives {
namespace {

struct Args {
    Workspace workspace;
    transport::WaitLimits limits;
    const char* src;
    char* outs[kMaxRanks];
    std::uint64_t staging;  // offset in the data area
    std::uint64_t slot;     // bytes of one slot
    std::uint64_t total;    // bytes of all parts together, in the source
    std::uint64_t part;     // bytes of each part but perhaps the last ones, in the source
    Chunking cut;
    Beside beside;
    std::uint64_t beside_at;     // where it lies in a slot
    std::uint32_t beside_chunk;  // bytes of it in a chunk of the call
    Bias bias;
    Landings landings;
    bool symmetric;
    bool brief;

    // Returns the slot of source `writer` at rank `of`. `slots`: where the slots start in every workspace.
    __device__ char* slot_at(std::uint64_t slots, int of, int writer) const {
        return workspace.base[of] + slots + writer * slot;
    }
    // Returns the slot of the second exchange.
    __device__ char* result_slot_at(std::uint64_t slots, int of, int writer) const {
        return slot_at(slots, of, workspace.world + writer);
    }
    // Return where this rank's part of the outs goes for rank `to`, in the first and the second exchange. An
    // element of a source has kNarrower times the bytes of one of a result.
    __device__ char* sent_to(std::uint64_t slots, int to) const {
        return in_out(to) ? outs[to] + workspace.rank * part : slot_at(slots, to, workspace.rank);
    }
    template <std::uint32_t kNarrower>
    __device__ char* result_sent_to(std::uint64_t slots, int to) const {
        char* const out = in_out(to)      ? outs[to]
                          : landings.told ? landings.of(workspace, to)
                                          : nullptr;
        return out != nullptr ? out + workspace.rank * part / kNarrower
                              : result_slot_at(slots, to, workspace.rank);
    }
    __device__ char* beside_out(int of) const {
        return static_cast<char*>(beside.out) + of * beside.bytes;
    }
    __device__ char* beside_sent_to(std::uint64_t slots, int to) const {
        return to == workspace.rank ? beside_out(to)
                                    : slot_at(slots, to, workspace.rank) + beside_at;
    }
    __device__ Chunk beside_of(std::uint32_t index) const {
        return chunk_of({beside_chunk, cut.chunks}, index, beside.bytes);
    }
    __device__ bool in_out(int to) const { return symmetric || to == workspace.rank; }
    __device__ int peer(int step) const { return (workspace.rank + step) % workspace.world; }
    __device__ std::uint64_t bytes_of(int part_of) const {
        const std::uint64_t at = min(part_of * part, total);
        return min(part, total - at);
    }
    __device__ std::uint32_t flags_of(std::uint32_t chunk) const { return chunk * workspace.world; }
    // Returns the bias for the elements from `at` bytes into the source on, where there is one.
    template <bool kBias, class In, class Out>
    __device__ RowOfChunk<Out> bias_from(std::uint64_t at) const {
        if constexpr (!kBias) return {};
        return {static_cast<const Out*>(bias.row), bias.columns,
                static_cast<std::uint32_t>(at / sizeof(In) % bias.columns)};
    }
};

__global__ __launch_bounds__(kThreads,
                             2) void all_gather_kernel(const __grid_constant__ Args args) {
    __shared__ Transfers transfers;
    ptx::wait_for_grid_before();
    Exchange exchange(args.workspace, args.limits, args.brief);
    const std::uint64_t slots = exchange.slots(args.staging);
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const auto send = [&](std::uint32_t index) {
        const Chunk chunk = chunk_of(args.cut, index, args.part);
        const bool aligned = set_transfers(transfers, world, [&](int i) {
            const int to = args.peer(i + 1);  // itself last: the peers wait
            transfers.src[i] = args.src + chunk.at;
            transfers.dst[i] = args.sent_to(slots, to) + chunk.at;
            transfers.bytes[i] = chunk.bytes;
        });
        copy_to_each(transfers, world, aligned);
        if (const Chunk more = args.beside_of(index); more.bytes != 0) {
            const bool even = set_transfers(transfers, world, [&](int i) {
                transfers.src[i] = static_cast<const char*>(args.beside.src) + more.at;
                transfers.dst[i] = args.beside_sent_to(slots, args.peer(i + 1)) + more.at;
                transfers.bytes[i] = more.bytes;
            });
            copy_to_each(transfers, world, even);
        }
        if (!args.symmetric) exchange.raise(args.flags_of(index));
        return true;
    };
    const auto take = [&](std::uint32_t index) {
        if (args.symmetric) return true;  // the end of the call is what says that all has come
        if (!exchange.await(args.flags_of(index), index)) return false;
        const Chunk chunk = chunk_of(args.cut, index, args.part);
        const bool aligned = set_transfers(transfers, world - 1, [&](int i) {
            const int from = args.peer(i + 1);
            transfers.src[i] = args.slot_at(slots, rank, from) + chunk.at;
            transfers.dst[i] = args.outs[rank] + from * args.part + chunk.at;
            transfers.bytes[i] = chunk.bytes;
        });
        copy_each(transfers, world - 1, chunk.bytes, aligned);
        if (const Chunk more = args.beside_of(index); more.bytes != 0) {
            const bool even = set_transfers(transfers, world - 1, [&](int i) {
                const int from = args.peer(i + 1);
                transfers.src[i] = args.slot_at(slots, rank, from) + args.beside_at + more.at;
                transfers.dst[i] = args.beside_out(from) + more.at;
                transfers.bytes[i] = more.bytes;
            });
            copy_each(transfers, world - 1, more.bytes, even);
        }
        return true;
    };
    if (!args.symmetric || exchange.meet()) for_each_chunk(args.cut.chunks, send, take);
    exchange.finish();
}

// Sends every rank's whole source to every rank, which each sum all of it.
template <class In, class Out, bool kBias>
__global__ __launch_bounds__(kThreads,
                             2) void all_reduce_one_shot_kernel(const __grid_constant__ Args args) {
    constexpr std::uint32_t kNarrower = sizeof(In) / sizeof(Out);
    __shared__ Transfers transfers;
    ptx::wait_for_grid_before();
    Exchange exchange(args.workspace, args.limits, args.brief);
    const std::uint64_t slots = exchange.slots(args.staging);
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const auto send = [&](std::uint32_t index) {
        const Chunk chunk = chunk_of(args.cut, index, args.total);
        const bool aligned = set_transfers(transfers, world - 1, [&](int i) {
            transfers.src[i] = args.src + chunk.at;
            transfers.dst[i] = args.slot_at(slots, args.peer(i + 1), rank) + chunk.at;
            transfers.bytes[i] = chunk.bytes;
        });
        copy_to_each(transfers, world - 1, aligned);
        exchange.raise(args.flags_of(index));
        return true;
    };
    const auto sum = [&](std::uint32_t index) {
        if (!exchange.await(args.flags_of(index), index)) return false;
        const Chunk chunk = chunk_of(args.cut, index, args.total);
        std::uint64_t at = chunk.at;
        const std::uint64_t end = chunk.at + chunk.bytes;
        while (at < end) {  // one owner's elements at a time
            const auto owner = static_cast<int>(at / args.part);
            const std::uint64_t upto = min(end, (owner + 1) * args.part);
            const bool aligned = set_transfers(transfers, world, [&](int i) {
                const int from = (owner + i) % world;
                transfers.src[i] = (from == rank ? args.src : args.slot_at(slots, rank, from)) + at;
                transfers.dst[i] = args.outs[rank] + at / kNarrower;
            });
            sum_to_each<kBias, In, Out>(transfers, world, static_cast<std::uint32_t>(upto - at), 1,
                                        args.bias_from<kBias, In, Out>(at), aligned);
            at = upto;
        }
        return true;
    };
    for_each_chunk(args.cut.chunks, send, sum);
    exchange.finish();
}

// Sends part p of every source to rank p, which sums it. kGather: the sums go to every rank.
template <class In, class Out, bool kGather, bool kBias, bool kTree>
__global__ __launch_bounds__(kThreads, 2) void reduce_kernel(const __grid_constant__ Args args) {
    constexpr std::uint32_t kNarrower = sizeof(In) / sizeof(Out);
    __shared__ Transfers transfers;
    ptx::wait_for_grid_before();
    Exchange exchange(args.workspace, args.limits, args.brief);
    const std::uint64_t slots = exchange.slots(args.staging);
    const int rank = args.workspace.rank;
    const int world = args.workspace.world;
    const auto send = [&](std::uint32_t index) {
        const bool aligned = set_transfers(transfers, world - 1, [&](int i) {
            const int to = args.peer(i + 1);
            const Chunk chunk = chunk_of(args.cut, index, args.bytes_of(to));
            transfers.src[i] = args.src + to * args.part + chunk.at;
            transfers.dst[i] = args.slot_at(slots, to, rank) + chunk.at;
            transfers.bytes[i] = chunk.bytes;
        });
        copy_each(transfers, world - 1, args.cut.chunk, aligned);
        exchange.raise(args.flags_of(index));
        return true;
    };
    const auto sum = [&](std::uint32_t index) {
        if (!exchange.await(args.flags_of(index), index)) return false;
        const Chunk chunk = chunk_of(args.cut, index, args.bytes_of(rank));
        const bool aligned = set_transfers(transfers, world, [&](int i) {
            const char* own = args.src + rank * args.part;
            const int from = kTree ? i : (rank + i) % world;
            transfers.src[i] = (from == rank ? own : args.slot_at(slots, rank, from)) + chunk.at;
            // Every rank that sent its part is in this call: its symmetric out may be written.
            transfers.dst[i] = (kGather ? args.result_sent_to<kNarrower>(slots, args.peer(i + 1))
                                        : args.outs[rank]) +
                               chunk.at / kNarrower;
        });
        sum_to_each<kBias, In, Out, kTree>(
            transfers, world, chunk.bytes, kGather ? world : 1,
            args.bias_from<kBias, In, Out>(rank * args.part + chunk.at), aligned);
        if (kGather && !args.symmetric) exchange.raise(args.flags_of(args.cut.chunks + index));
        return true;
    };
    const auto take = [&](std::uint32_t index) {
        if (args.symmetric || args.landings.lands()) return true;
        if (!exchange.await(args.flags_of(args.cut.chunks + index), index)) return false;
        const bool aligned = set_transfers(transfers, world - 1, [&](int i) {
            const int from = args.peer(i + 1);
            const Chunk chunk = chunk_of(args.cut, index, args.bytes_of(from));
            transfers.src[i] = args.result_slot_at(slots, rank, from) + chunk.at / kNarrower;
            transfers.dst[i] = args.outs[rank] + (from * args.part + chunk.at) / kNarrower;
            transfers.bytes[i] = chunk.bytes / kNarrower;
        });
        copy_each(transfers, world - 1, args.cut.chunk / kNarrower, aligned);
        return true;
    };
    if constexpr (kGather) {
        if (args.landings.told) exchange.tell(args.landings);
        for_each_chunk(args.cut.chunks, send, sum, take);
    } else {
        for_each_chunk(args.cut.chunks, send, sum);
    }
    exchange.finish();
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
    return (value + to - 1) / to * to;
}

std::uint64_t slot_bytes(std::uint64_t bytes) {
    return round_up(bytes, 128);
}

// Returns the elements that each rank owns, except perhaps the last ones; whole 16 bytes of the result.
std::uint64_t owned_elements(int world, std::uint64_t elements) {
    return round_up((elements + world - 1) / world, 16 / kResultBytes);
}

// Cuts small parts so that they are spread over many blocks, and large ones so that sending and consuming
// overlap; chunks are larger where the flags would not suffice. `exchanges`: those with flags of their own.
Chunking cut(std::uint64_t bytes, int world, std::uint32_t exchanges) {
    constexpr std::uint64_t kSmallest = 4u << 10;
    constexpr std::uint64_t kLargest = 64u << 10;
    constexpr std::uint64_t kSpread = 128;
    const std::uint64_t most = kFlags / (static_cast<std::uint64_t>(world) * exchanges);
    const std::uint64_t chunk =
        round_up(std::max(std::clamp(bytes / kSpread, kSmallest, kLargest), bytes / most + 1), 512);
    if (chunk > (1u << 28)) {
        throw std::invalid_argument(std::to_string(bytes) + " bytes a part are too many");
    }
    return {static_cast<std::uint32_t>(chunk),
            static_cast<std::uint32_t>((bytes + chunk - 1) / chunk)};
}

void check_call(const Collective& call, const void* src, const Outs& out,
                std::uint64_t staging_needed, std::uint64_t src_element,
                std::uint64_t out_element) {
    const int world = call.workspace.world;
    if (call.staging % 16 != 0) {
        throw std::invalid_argument("staging = " + std::to_string(call.staging) +
                                    "; expected a multiple of 16");
    }
    if (world > 1 && staging_needed > call.staging_bytes) {
        throw std::invalid_argument("staging_bytes = " + std::to_string(call.staging_bytes) +
                                    "; this call needs " + std::to_string(staging_needed));
    }
    const auto check_address = [&](const void* at, const char* name, std::uint64_t alignment) {
        if (reinterpret_cast<std::uintptr_t>(at) % alignment != 0) {
            throw std::invalid_argument(std::string(name) + " is not aligned to its elements of " +
                                        std::to_string(alignment) + " bytes");
        }
    };
    check_address(src, "src", src_element);
    for (int rank = 0; rank < world; ++rank) {
        if (rank == call.workspace.rank || out.symmetric)
            check_address(out.at[rank], "out", out_element);
    }
}

void check_bias(const Bias& bias, std::uint64_t elements) {
    if (bias.row == nullptr) return;
    if (reinterpret_cast<std::uintptr_t>(bias.row) % 16 != 0) {
        throw std::invalid_argument("bias is not aligned to 16 bytes");
    }
    if (bias.columns == 0 || bias.columns % 8 != 0 || elements % bias.columns != 0) {
        throw std::invalid_argument("columns = " + std::to_string(bias.columns) +
                                    "; expected a multiple of 8 that divides the " +
                                    std::to_string(elements) + " elements of the result");
    }
}

// `slot`: bytes of a slot at least, one a rank in each of `exchanges`.
Args make_args(const Collective& call, const void* src, const Outs& out, std::uint64_t total,
               std::uint64_t part, std::uint64_t slot, std::uint32_t exchanges, Chunking cut) {
    Args args{};
    args.workspace = call.workspace;
    args.limits = call.limits;
    args.src = static_cast<const char*>(src);
    for (int rank = 0; rank < kMaxRanks; ++rank) args.outs[rank] = static_cast<char*>(out.at[rank]);
    args.staging = call.staging;
    args.slot = slot_bytes(slot);
    args.total = total;
    args.part = part;
    args.cut = cut;
    args.symmetric = out.symmetric;
    const std::uint64_t slots = std::uint64_t{exchanges} * call.workspace.world;
    args.brief =
        !out.symmetric && slots * args.slot <= kBriefBytes && slots * cut.chunks <= kBriefFlags;
    return args;
}

void launch(void (*kernel)(Args), const Args& args, const Collective& call, cudaStream_t stream) {
    launch_early(kernel, args, std::min(most_blocks(call), args.cut.chunks), kThreads, stream);
}

using Kernel = void (*)(Args);

template <bool kGather>
Kernel reduce_of(Element element, const Bias& bias, bool tree) {
    return of_element<Kernel>(element, [&](auto source, auto result) -> Kernel {
        using In = decltype(source);
        using Out = decltype(result);
        if constexpr (sizeof(In) == sizeof(Out)) {
            if (tree) {
                return bias.row == nullptr ? reduce_kernel<In, Out, kGather, false, true>
                                           : reduce_kernel<In, Out, kGather, true, true>;
            }
        }
        return bias.row == nullptr ? reduce_kernel<In, Out, kGather, false, false>
                                   : reduce_kernel<In, Out, kGather, true, false>;
    });
}

Kernel one_shot_of(Element element, const Bias& bias) {
    return of_element<Kernel>(element, [&](auto source, auto result) -> Kernel {
        using In = decltype(source);
        using Out = decltype(result);
        return bias.row == nullptr ? all_reduce_one_shot_kernel<In, Out, false>
                                   : all_reduce_one_shot_kernel<In, Out, true>;
    });
}

// Does the work of a world of one rank, and of an empty call; returns whether the call was one of these.
bool is_trivial(const Collective& call, const void* src, const Outs& out, std::uint64_t bytes,
                cudaStream_t stream) {
    if (bytes == 0) return true;
    if (call.workspace.world > 1) return false;
    if (out.at[0] == src) return true;
    cuda::check(cudaMemcpyAsync(out.at[0], src, bytes, cudaMemcpyDefault, stream),
                "cudaMemcpyAsync");
    return true;
}

}  // namespace

std::uint64_t all_gather_staging(int world, std::uint64_t shard_bytes, bool symmetric,
                                 std::uint64_t beside_bytes) {
    return symmetric ? 0 : world * (slot_bytes(shard_bytes) + slot_bytes(beside_bytes));
}

std::uint64_t reduce_scatter_staging(int world, Element element, std::uint64_t part_elements) {
    return world * slot_bytes(part_elements * source_bytes(element));
}

std::uint64_t all_reduce_staging(int world, Element element, std::uint64_t elements, Way way,
                                 bool symmetric) {
    if (way == Way::one_shot) return world * slot_bytes(elements * source_bytes(element));
    return (symmetric ? 1 : 2) * world *
           slot_bytes(owned_elements(world, elements) * source_bytes(element));
}

void all_gather(const Collective& call, const void* src, std::uint64_t shard_bytes, const Outs& out,
                cudaStream_t stream, const Beside& beside) {
    const int world = call.workspace.world;
    if (beside.bytes != 0 && (out.symmetric || shard_bytes == 0 || world == 1)) {
        throw std::invalid_argument(std::to_string(beside.bytes) + " bytes beside a gather of " +
                                    std::to_string(shard_bytes) +
                                    "; expected none without slots of several ranks");
    }
    check_call(call, src, out, all_gather_staging(world, shard_bytes, out.symmetric, beside.bytes),
               1, 1);
    if (is_trivial(call, src, out, shard_bytes, stream)) return;
    if (call.by_mail) {
        all_gather_by_mail(call, src, shard_bytes, out.at[call.workspace.rank], stream, beside);
        return;
    }
    const std::uint64_t slot = slot_bytes(shard_bytes) + slot_bytes(beside.bytes);
    Args args = make_args(call, src, out, world * shard_bytes, shard_bytes, slot, 1,
                          cut(shard_bytes, world, 1));
    args.beside = beside;
    args.beside_at = slot_bytes(shard_bytes);
    const std::uint64_t share = (beside.bytes + args.cut.chunks - 1) / args.cut.chunks;
    args.beside_chunk = static_cast<std::uint32_t>(round_up(share, 16));
    launch(all_gather_kernel, args, call, stream);
}

void reduce_scatter(const Collective& call, Element element, const void* src,
                    std::uint64_t part_elements, void* out, const Bias& bias, cudaStream_t stream) {
    const int world = call.workspace.world;
    Outs outs;
    outs.at[call.workspace.rank] = out;
    check_call(call, src, outs, reduce_scatter_staging(world, element, part_elements),
               source_bytes(element), kResultBytes);
    check_bias(bias, part_elements);
    if (call.tree) check_tree(world, element);
    const std::uint64_t part = part_elements * source_bytes(element);
    const bool copied = !from_float32(element) && bias.row == nullptr && !call.tree;
    if (part == 0 || (copied && is_trivial(call, src, outs, part, stream))) return;
    if (call.by_mail && world > 1) {
        reduce_scatter_by_mail(call, element, src, part_elements, out, bias, stream);
        return;
    }
    Args args = make_args(call, src, outs, world * part, part, part, 1, cut(part, world, 1));
    args.bias = bias;
    launch(reduce_of<false>(element, bias, call.tree), args, call, stream);
}

void all_reduce(const Collective& call, Element element, const void* src, std::uint64_t elements,
                const Outs& out, Way way, const Bias& bias, cudaStream_t stream) {
    const int world = call.workspace.world;
    check_call(call, src, out, all_reduce_staging(world, element, elements, way, out.symmetric),
               source_bytes(element), kResultBytes);
    check_bias(bias, elements);
    if (call.tree) {
        check_tree(world, element);
        if (call.by_mail != (way == Way::one_shot)) {
            throw std::invalid_argument(
                "a tree by one shot with flags, or by two exchanges of mail");
        }
    }
    const std::uint64_t total = elements * source_bytes(element);
    const bool copied = !from_float32(element) && bias.row == nullptr && !call.tree;
    if (total == 0 || (copied && is_trivial(call, src, out, total, stream))) return;
    if (call.by_mail && world > 1 && (way == Way::one_shot || !out.symmetric)) {
        const auto by_mail = way == Way::one_shot ? all_reduce_by_mail : all_reduce_twice_by_mail;
        by_mail(call, element, src, elements, owned_elements(world, elements),
                out.at[call.workspace.rank], bias, stream);
        return;
    }
    const std::uint64_t part = owned_elements(world, elements) * source_bytes(element);
    if (way == Way::one_shot) {
        Args args = make_args(call, src, out, total, part, total, 1, cut(total, world, 1));
        args.bias = bias;
        launch(one_shot_of(element, bias), args, call, stream);
        return;
    }
    Args args = make_args(call, src, out, total, part, part, 2, cut(part, world, 2));
    args.bias = bias;
    args.landings = call.landings;
    args.landings.told = call.landings.told && !out.symmetric && !args.brief;
    launch(reduce_of<true>(element, bias, call.tree), args, call, stream);
}

}  // namespace mkernel::cuda::collectives
