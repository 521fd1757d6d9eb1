// The end of a call whose last kernel does not end it: what is left to copy out of the workspace is copied, and
// then every rank has done so before any rank's next call writes there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda {

// Copies that end a call: of any bytes, at any alignment, between ranges that do not overlap.
class LastCopies {
  public:
    static constexpr int kMost = 6;
    struct Copy {
        void* to;
        const void* from;
        std::uint64_t nbytes;
    };

    // Adds a copy, unless it is of nothing, or onto itself as of a rank's own rows that lie where they are
    // gathered. std::invalid_argument: there are kMost already.
    void add(std::uint64_t to, std::uint64_t from, std::uint64_t nbytes);

    Copy each[kMost];
    int count = 0;
};

// Loads the kernel here to the current device (host/gemm/parts.hpp: load_parts).
void load_rendezvous();

// Uses up an epoch, unless the world is of one rank. Queued on the current device's `stream`; may be captured.
// CudaError.
void rendezvous(const Workspace& workspace, const transport::WaitLimits& limits,
                const LastCopies& copies, cudaStream_t stream);

}  // namespace mkernel::cuda
