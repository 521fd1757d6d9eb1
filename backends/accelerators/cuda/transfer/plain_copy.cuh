// The plain engine: all threads load and store 16 bytes at a time.
//
// It takes any addresses and any size. Where source and destination do not lie alike within 16 bytes, stores
// are still whole and loads are still aligned: each warp shifts the loaded bytes by the difference (about a
// third slower). Nothing outside of the source is read, nothing outside of the destination written; the ends
// go byte by byte.
//
// Order: plain accesses of the calling threads; barriers, acquires and releases are the caller's.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/ptx/vector.cuh"

namespace mkernel::cuda::transfer {

namespace detail {

inline constexpr int kUnroll = 8;

// Returns 16 bytes starting at byte `by` (0 to 15) of the 32 bytes of low, high.
__device__ inline uint4 shifted(uint4 low, uint4 high, unsigned by) {
    std::uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (by & 4) {
#pragma unroll
        for (int i = 0; i < 7; ++i) w[i] = w[i + 1];
    }
    if (by & 8) {
#pragma unroll
        for (int i = 0; i < 5; ++i) w[i] = w[i + 2];
    }
    const unsigned bits = by % 4 * 8;
    return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
            __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)};
}

// Copies vectors between addresses that are both aligned to 16 bytes. Warps take runs of kUnroll * 512 bytes;
// the rest is spread thinly, so that a small copy has all its loads under way at once.
__device__ inline void copy_vectors(char* dst, const char* src, std::uint64_t vectors,
                                    std::uint64_t thread, std::uint64_t threads) {
    constexpr std::uint64_t kRun = kUnroll * 512;
    uint4 v[kUnroll];
    const std::uint64_t round = threads * kUnroll;
    const std::uint64_t rounds = vectors / round;
    std::uint64_t at = thread / 32 * kRun + thread % 32 * 16;
    for (std::uint64_t turn = 0; turn < rounds; ++turn, at += round * 16) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) v[i] = ptx::load_16(src + at + i * 512);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) ptx::store_16(dst + at + i * 512, v[i]);
    }
    src += rounds * round * 16;
    dst += rounds * round * 16;
    const std::uint64_t left = vectors - rounds * round;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        at = thread + half * threads * (kUnroll / 2);
#pragma unroll
        for (int i = 0; i < kUnroll / 2; ++i) {
            if (at + i * threads < left) v[i] = ptx::load_16(src + (at + i * threads) * 16);
        }
#pragma unroll
        for (int i = 0; i < kUnroll / 2; ++i) {
            if (at + i * threads < left) ptx::store_16(dst + (at + i * threads) * 16, v[i]);
        }
    }
}

// Copies to dst, aligned to 16, from src, `by` (1 to 15) bytes past an aligned address; the 16 bytes that
// hold its last one must all be readable.
__device__ inline void copy_shifted(char* dst, const char* src, unsigned by, std::uint64_t vectors,
                                    std::uint64_t thread, std::uint64_t threads) {
    constexpr int kTile = kUnroll / 2;
    const char* from = src - by;
    const unsigned lane = thread % 32;
    for (std::uint64_t first = thread / 32 * 32 * kTile; first < vectors;
         first += threads * kTile) {
        uint4 low[kTile], beyond[kTile];
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            const std::uint64_t at = first + i * 32 + lane;
            if (at <= vectors) low[i] = ptx::load_16(from + at * 16);
            if (lane == 31 && at < vectors) beyond[i] = ptx::load_16(from + at * 16 + 16);
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
            uint4 high;
            high.x = __shfl_down_sync(0xffffffffu, low[i].x, 1);
            high.y = __shfl_down_sync(0xffffffffu, low[i].y, 1);
            high.z = __shfl_down_sync(0xffffffffu, low[i].z, 1);
            high.w = __shfl_down_sync(0xffffffffu, low[i].w, 1);
            if (lane == 31) high = beyond[i];
            const std::uint64_t at = first + i * 32 + lane;
            if (at < vectors) ptx::store_16(dst + at * 16, shifted(low[i], high, by));
        }
    }
}

}  // namespace detail

// Copies the share of thread `thread` of `threads`. Whole warps take part, `threads` is a multiple of 32, and
// every thread of the set calls it, in any number of blocks.
__device__ inline void copy_plain(char* dst, const char* src, std::uint64_t nbytes,
                                  std::uint64_t thread, std::uint64_t threads) {
    std::uint64_t front = min(-reinterpret_cast<std::uintptr_t>(dst) & 15, nbytes);
    std::uint64_t vectors = (nbytes - front) / 16;
    const unsigned by = reinterpret_cast<std::uintptr_t>(src + front) & 15;
    if (by == 0) {
        detail::copy_vectors(dst + front, src + front, vectors, thread, threads);
    } else {
        // Only aligned 16 bytes that lie inside of the source are loaded whole.
        if (front < by && vectors > 0) {
            front += 16;
            --vectors;
        }
        if (vectors > 0 && front + vectors * 16 - by + 16 > nbytes) --vectors;
        detail::copy_shifted(dst + front, src + front, by, vectors, thread, threads);
    }
    const std::uint64_t back = front + vectors * 16;
    for (std::uint64_t i = thread; i < front; i += threads) dst[i] = src[i];
    for (std::uint64_t i = back + thread; i < nbytes; i += threads) dst[i] = src[i];
}

}  // namespace mkernel::cuda::transfer
