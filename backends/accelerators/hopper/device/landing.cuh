// Where peers may put a rank's output that is private to it: outputs that lie in memory which peers map
// (cuda/output_memory.hpp), each rank's at a place of its own, since ranks free tensors at different times.
//
// A rank tells its place of a call with the first word that it sets in it, so the place is of this very call:
// it is overwritten in the next one at the earliest, when every rank has said that it needs nothing of this one.
// A rank whose output lies elsewhere tells that too, and gets its results through the workspace.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/device/workspace.cuh"

namespace mkernel::hopper {

inline constexpr int kOutputRanges = 4;

// A place in a range; 0: nowhere.
inline constexpr int kRangeShift = 56;
inline std::uint64_t landing_at(int range, std::uint64_t offset) {
    return (static_cast<std::uint64_t>(range) << kRangeShift) | (offset + 1);
}

struct Landings {
    char* ranges[kOutputRanges][kMaxRanks];  // every rank's, mapped here; null: there is none
    std::uint64_t own;                       // this rank's place
    bool told;  // whether ranks tell their places in this call; the same on all of them

    // Writes the own place where `peer` looks for it; before a word that this thread sets there.
    __device__ void tell(const Workspace& workspace, int peer) const {
        workspace.control(peer).landings[workspace.rank] = own;
    }
    // Where that rank's output lies, once its word of this call was seen; null: not where peers may put.
    __device__ char* of(const Workspace& workspace, int peer) const {
        const std::uint64_t place = workspace.control().landings[peer];
        if (place == 0) return nullptr;
        const std::uint64_t offset = place & ((std::uint64_t{1} << kRangeShift) - 1);
        return ranges[place >> kRangeShift][peer] + offset - 1;
    }
    // Whether peers put what is this rank's into its output.
    __device__ bool lands() const { return told && own != 0; }
};

}  // namespace mkernel::hopper
