// The parts that the collectives' kernels share: the cut of a part into chunks, the blocks that do each, and
// the signal and wait for a chunk's arrival.
#pragma once

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/accelerators/cuda/device/landing.cuh"
#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda::collectives {

inline constexpr int kThreads = 512;

// The cut of parts into chunks of `chunk` bytes, a multiple of 16; the same on all ranks.
struct Chunking {
    std::uint32_t chunk;
    std::uint32_t chunks;
};

// A chunk of a part; the last ones may be short or empty.
struct Chunk {
    std::uint64_t at;     // bytes into the part
    std::uint32_t bytes;  // may be 0
};

__device__ inline Chunk chunk_of(const Chunking& cut, std::uint32_t index,
                                 std::uint64_t part_bytes) {
    const std::uint64_t at = min(std::uint64_t{index} * cut.chunk, part_bytes);
    return {at, static_cast<std::uint32_t>(min(std::uint64_t{cut.chunk}, part_bytes - at))};
}

// One call's exchange, as each block sees it. All threads of a block call its functions together.
class Exchange {
  public:
    // `brief`: as in device/call.cuh.
    __device__ Exchange(const Workspace& workspace, const transport::WaitLimits& limits, bool brief)
        : workspace_(workspace),
          waiter_(waiter_of(workspace, limits, transport::Waiter::comm_kernel)),
          epoch_(workspace.control().state.epoch),
          brief_(brief) {}

    // Returns where the call's slots start in every rank's workspace. `staging`: offset in the data area.
    __device__ std::uint64_t slots(std::uint64_t staging) const {
        return brief_ ? kBriefOffset + epoch_ % 2 * kBriefBytes : kDataOffset + staging;
    }

    // Waits until every peer is in this call, so that its symmetric buffers may be written; returns whether
    // all are.
    __device__ bool meet() {
        if (blockIdx.x == 0 && threadIdx.x == 0) announce_start(workspace_, epoch_);
        return all([&](std::uint32_t peer) {
            return waiter_.until(workspace_.control().started[peer], epoch_, awaited(peer));
        });
    }

    // Publishes to every peer where this rank's output lies; called before the first `raise`.
    __device__ void tell(const Landings& landings) const {
        if (is_peer(threadIdx.x)) landings.tell(workspace_, static_cast<int>(threadIdx.x));
    }

    // Signals to every peer that this rank's stores of the chunk by this block are done.
    __device__ void raise(std::uint32_t first_flag) {
        __syncthreads();
        if (is_peer(threadIdx.x)) {
            (flags(static_cast<int>(threadIdx.x)) + first_flag + workspace_.rank)->set(epoch_);
        }
    }

    // Waits until the chunk has arrived from every peer; returns whether it has.
    __device__ bool await(std::uint32_t first_flag, std::uint32_t chunk) {
        return all([&](std::uint32_t peer) {
            return waiter_.until(*(flags(workspace_.rank) + first_flag + peer), epoch_,
                                 {first_flag + peer, peer, chunk});
        });
    }

    // Ends the block's part of the call.
    __device__ void finish() {
        __syncthreads();
        if (threadIdx.x != 0) return;
        if (brief_) {
            finish_brief_call(workspace_, epoch_);
        } else {
            finish_call(workspace_, waiter_, epoch_);
        }
    }

  private:
    __device__ transport::SetWord* flags(int of) const {
        return brief_ ? workspace_.brief_flags(of) : workspace_.flags(of);
    }
    __device__ bool is_peer(std::uint32_t rank) const {
        return rank < static_cast<std::uint32_t>(workspace_.world) &&
               rank != static_cast<std::uint32_t>(workspace_.rank);
    }

    // Makes one thread wait for each peer; what the peers wrote is then visible to the whole block.
    template <class Wait>
    __device__ bool all(Wait&& wait) {
        const bool come = !is_peer(threadIdx.x) || wait(threadIdx.x);
        return __syncthreads_and(come) != 0;
    }

    const Workspace& workspace_;
    transport::DeviceWaiter waiter_;
    std::uint64_t epoch_;
    bool brief_;
};

// Runs the stages of this block's chunks, each stage one turn after the previous one, so that a chunk travels
// while the next is sent. A stage takes a chunk's index and returns whether to go on.
template <class... Stages>
__device__ void for_each_chunk(std::uint32_t chunks, Stages&&... stages) {
    const std::uint32_t mine = blockIdx.x < chunks ? (chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
    for (std::uint32_t turn = 0; turn + 1 < mine + sizeof...(Stages); ++turn) {
        std::uint32_t lag = 0;
        bool going = true;
        const auto run = [&](auto& stage) {
            const std::uint32_t index = turn - lag++;
            if (going && index < mine) going = stage(blockIdx.x + index * gridDim.x);
        };
        (run(stages), ...);
        if (!going) return;
    }
}

// The block's next copies or sums, in shared memory: `count` sources, destinations and lengths.
struct Transfers {
    const char* src[kMaxRanks];
    char* dst[kMaxRanks];
    std::uint32_t bytes[kMaxRanks];
};

// Sets entry i < count of the block's transfers, by thread i, from `fill(i)`. Returns whether all addresses
// are multiples of 16. When it returns, the transfers are set and the threads' earlier work is done.
template <class Fill>
__device__ bool set_transfers(Transfers& transfers, int count, Fill&& fill) {
    __syncthreads();
    bool aligned = true;
    const auto i = static_cast<int>(threadIdx.x);
    if (i < count) {
        fill(i);
        aligned = (reinterpret_cast<std::uintptr_t>(transfers.src[i]) |
                   reinterpret_cast<std::uintptr_t>(transfers.dst[i])) %
                      16 ==
                  0;
    }
    return __syncthreads_and(aligned) != 0;
}

// Copies the bytes that are not whole vectors one by one, and all of a copy that is not aligned.
__device__ inline void copy_rest(char* dst, const char* src, std::uint32_t from,
                                 std::uint32_t nbytes) {
#pragma unroll 1
    for (std::uint32_t at = from + threadIdx.x; at < nbytes; at += kThreads) dst[at] = src[at];
}

// Copies src[0], bytes[0] long, to dst[i] for i < count; one load for all.
__device__ inline void copy_to_each(const Transfers& transfers, int count, bool aligned) {
    constexpr std::uint32_t kUnroll = 4;
    const std::uint32_t nbytes = transfers.bytes[0];
    const std::uint32_t whole = aligned ? nbytes / 16 * 16 : 0;
    const char* src = transfers.src[0];
    for (std::uint32_t first = threadIdx.x * 16; first < whole; first += kThreads * 16 * kUnroll) {
        uint4 v[kUnroll];
#pragma unroll
        for (std::uint32_t u = 0; u < kUnroll; ++u) {
            const std::uint32_t at = first + u * kThreads * 16;
            if (at < whole) v[u] = ptx::load_16(src + at);
        }
        for (int i = 0; i < count; ++i) {
            char* dst = transfers.dst[i] + first;
#pragma unroll
            for (std::uint32_t u = 0; u < kUnroll; ++u) {
                if (first + u * kThreads * 16 < whole) ptx::store_16(dst + u * kThreads * 16, v[u]);
            }
        }
    }
    for (int i = 0; i < count; ++i) copy_rest(transfers.dst[i], src, whole, nbytes);
}

// Copies src[i] to dst[i], bytes[i] long and at most `most`, for i < count, all under way at once.
__device__ inline void copy_each(const Transfers& transfers, int count, std::uint32_t most,
                                 bool aligned) {
    constexpr std::uint32_t kUnroll = 4;
    if (aligned) {
        const std::uint32_t vectors = most / 16;
        const std::uint32_t items = vectors * count;
        for (std::uint32_t first = threadIdx.x; first < items; first += kThreads * kUnroll) {
            uint4 v[kUnroll];
            char* dst[kUnroll];
#pragma unroll
            for (std::uint32_t u = 0; u < kUnroll; ++u) {
                const std::uint32_t item = first + u * kThreads;
                const std::uint32_t i = item / vectors;
                const std::uint32_t at = item % vectors * 16;
                dst[u] = nullptr;
                if (item < items && at + 16 <= transfers.bytes[i]) {
                    v[u] = ptx::load_16(transfers.src[i] + at);
                    dst[u] = transfers.dst[i] + at;
                }
            }
#pragma unroll
            for (std::uint32_t u = 0; u < kUnroll; ++u) {
                if (dst[u] != nullptr) ptx::store_16(dst[u], v[u]);
            }
        }
    }
    for (int i = 0; i < count; ++i) {
        const std::uint32_t whole = aligned ? transfers.bytes[i] / 16 * 16 : 0;
        copy_rest(transfers.dst[i], transfers.src[i], whole, transfers.bytes[i]);
    }
}

}  // namespace mkernel::cuda::collectives
