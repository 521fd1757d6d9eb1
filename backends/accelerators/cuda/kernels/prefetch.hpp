// The bytes that the next kernel will read, which a kernel brings to L2 while it waits for its peers: memory idles
// then. They are in no result.
//
// A block issues requests only as fast as its multiprocessor serves them, about 27 bytes a nanosecond on H200. Blocks
// that wait for mail would be late for it meanwhile, so others prefetch, which are launched beside them and wait for
// nobody. A kernel whose loads are a thread's own work has that thread prefetch in every block instead.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace mkernel::cuda {

struct Prefetch {
    static constexpr std::uint32_t kChunk = 16u << 10;  // bytes of a request
    static constexpr std::uint32_t kMostBlocks = 64;    // beside those that exchange
    static constexpr std::uint32_t kLeastBlocks = 16;   // of these; else nothing is prefetched

    std::uint64_t begin = 0;     // address, a multiple of 16
    std::uint32_t nbytes = 0;    // a multiple of 16; 0: nothing is prefetched
    std::uint32_t exchange = 0;  // the first blocks, which do not prefetch

    // Returns the whole 16 bytes among these. `nbytes`: at most 1 GiB.
    static constexpr Prefetch of(std::uint64_t address, std::uint32_t nbytes) {
        const std::uint64_t begin = (address + 15) / 16 * 16, end = (address + nbytes) / 16 * 16;
        return begin < end ? Prefetch{begin, static_cast<std::uint32_t>(end - begin)} : Prefetch{};
    }

    // Chooses the blocks that prefetch for an exchange by `blocks` of the `most` that a grid may have; returns how
    // many the grid has.
    constexpr std::uint32_t blocks_beside(std::uint32_t blocks, std::uint32_t most) {
        exchange = blocks;
        if (most - blocks < kLeastBlocks) nbytes = 0;
        return blocks + std::min({(nbytes + kChunk - 1) / kChunk, kMostBlocks, most - blocks});
    }

    // Calls `each(address, nbytes)` for a block's own share in a grid of so many.
    template <class Each>
    __host__ __device__ constexpr void for_share(std::uint32_t block, std::uint32_t blocks,
                                                 Each&& each) const {
        if (block < exchange) return;
        for (std::uint32_t at = (block - exchange) * kChunk; at < nbytes;
             at += (blocks - exchange) * kChunk) {
            each(begin + at, nbytes - at < kChunk ? nbytes - at : kChunk);
        }
    }
};

}  // namespace mkernel::cuda
