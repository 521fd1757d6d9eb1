// The division of a call's tiles among clusters.
//
// Tiles have an order; cluster c of C takes those of number c, c + C, ...: a wave after the other. Where the
// last wave has fewer tiles than there are clusters, each of its tiles may be cut into `splits` along K, each
// a share of its own. All but the last are *kept*: written unrounded to memory of this GPU. The cluster that
// has the last share adds them to its own sums in the order of K, and goes on as with a whole tile. Shares
// are taken in rising order and only last ones wait, for those before them, so that of the shares that are
// not done the first waits for no other.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace mkernel::hopper {

// The number of steps of K that the last share of a tile has more than the others, whose sums are written and
// loaded meanwhile.
inline constexpr int kMoreOfLast = 3;

// A tile, or one split of it.
struct Share {
    int tile;  // in the order of the tiles
    int split, splits;
    int kept;  // the place of split 0 among those that are kept; of a whole tile without meaning

    // Return the steps of K of this share, from `first` to before `end`, of `steps`.
    __host__ __device__ int first(int steps) const { return of_each(steps) * split / splits; }
    __host__ __device__ int end(int steps) const {
        return is_last() ? steps : of_each(steps) * (split + 1) / splits;
    }
    // Returns true where this share makes the results.
    __host__ __device__ bool is_last() const { return split == splits - 1; }

  private:
    // Returns the steps that the tile's shares have in equal parts, together.
    __host__ __device__ static int of_each(int steps) {
        return steps > kMoreOfLast ? steps - kMoreOfLast : 0;
    }
};

// The cut of a call's last wave, and the place where splits are kept.
struct LastWave {
    int splits = 1;             // of each of its tiles; 1: it is not cut
    std::uint64_t kept_at = 0;  // in the data area
};

class Shares {
  public:
    __host__ __device__ Shares(int tiles, int clusters, int splits)
        : whole_(splits > 1 ? tiles - tiles % clusters : tiles),
          cut_(tiles - whole_),
          splits_(splits) {}

    __host__ __device__ int count() const { return whole_ + cut_ * splits_; }
    __host__ __device__ int kept() const { return cut_ * (splits_ - 1); }
    __host__ __device__ Share at(int index) const {
        if (index < whole_) return {index, 0, 1, 0};
        const int cut = (index - whole_) / splits_;
        return {whole_ + cut, index - whole_ - cut * splits_, splits_, cut * (splits_ - 1)};
    }

  private:
    int whole_;  // tiles that are not cut
    int cut_;
    int splits_;
};

// Returns how many clusters of `cluster` blocks a launch of `blocks` has for so many shares; `others` of the
// blocks have other work.
inline int clusters_of(int blocks, int others, int cluster, int shares) {
    return std::min(std::max((blocks - others) / cluster, 1), shares);
}

}  // namespace mkernel::hopper
