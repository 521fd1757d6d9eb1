// The places where peers may put a rank's output that is private to it: such outputs lie in memory which
// peers map (cuda/output_memory.hpp), each rank's at a place of its own, since ranks free tensors at
// different times.
//
// A rank publishes its place for a call with the first word that it sets in the call, so the place belongs to
// this very call: it is overwritten in the next one at the earliest, when every rank has signalled that it
// needs nothing of this one. A rank whose output lies elsewhere publishes that too, and gets its results
// through the workspace.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"

namespace mkernel::cuda {

inline constexpr int kOutputRanges = 4;

// A place in a range; 0 means that peers may put nowhere.
inline constexpr int kRangeShift = 56;
inline std::uint64_t landing_at(int range, std::uint64_t offset) {
    return (static_cast<std::uint64_t>(range) << kRangeShift) | (offset + 1);
}

struct Landings {
    char* ranges[kOutputRanges][kMaxRanks];  // every rank's, mapped here; null: there is none
    std::uint64_t own;                       // this rank's place
    bool told;  // whether ranks tell their places in this call; the same on all of them

    // Writes the own place where `peer` looks for it; called before the word that this thread sets there.
    __device__ void tell(const Workspace& workspace, int peer) const {
        workspace.control(peer).landings[workspace.rank] = own;
    }
    // Returns where that rank's output lies, once its word of this call has been seen; null where peers may
    // not put into it.
    __device__ char* of(const Workspace& workspace, int peer) const {
        const std::uint64_t place = workspace.control().landings[peer];
        if (place == 0) return nullptr;
        const std::uint64_t offset = place & ((std::uint64_t{1} << kRangeShift) - 1);
        return ranges[place >> kRangeShift][peer] + offset - 1;
    }
    // Returns true where peers put what belongs to this rank into its output.
    __device__ bool lands() const { return told && own != 0; }
};

}  // namespace mkernel::cuda
