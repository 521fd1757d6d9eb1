// Slots of data that every rank sends whole to ranks of other nodes, by puts of a NIC: a slot a rank in the
// data area, laid out alike on all of them (device/network.cuh).
//
// Data flow of one call on rank r:
//   a tensor of r ──copied──▶ slot r of the own area ──put──▶ slot r of every rank of another node
//   word of rank s ──one block, which runs until all have come──▶ flag s; where areas are staged, that block
//        copies slot s into the data area first
// Slots may travel in pieces, each with its put, its word and its flag; they land in their order. Where ranks relay
// (device/rails.cuh), slots go to and come from ranks of the own rail alone, and some are passed on to the whole node.
//
// A kernel that waits for a flag may take all multiprocessors, and so keep out the block that sets it. It
// cannot where it starts after a wait for the first of that block's flags: then the block runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/accelerators/cuda/device/workspace.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::cuda {

// Slot s is at `offset` + s * `bytes` of the data area; flag `flag` + s * pieces() + p signals that its piece p is
// there, and all pieces before it. Pieces have `piece_bytes`, the last one what is left. Offset and bytes are multiples
// of 4.
struct FarSlots {
    std::uint64_t offset, bytes;
    std::uint32_t flag;
    std::uint64_t piece_bytes;
    bool relayed = false;    // they cross by rails
    bool passed_on = false;  // a rank brings what crosses to it to all of its node

    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint32_t pieces() const {
        return bytes <= piece_bytes
                   ? 1
                   : static_cast<std::uint32_t>((bytes + piece_bytes - 1) / piece_bytes);
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::uint64_t bytes_of(std::uint32_t piece) const {
        const std::uint64_t left = bytes - piece * piece_bytes;
        return left < piece_bytes ? left : piece_bytes;
    }
};
inline constexpr int kMostFarSlots = 2;

struct Landing {
    FarSlots slots[kMostFarSlots];
    std::int32_t count;
};

// Loads the kernels here to the current device (host/moe/ops.hpp: load; host/gemm/parts.hpp: load_parts).
void load_far_slots();

// All functions here queue on the current device's `stream`; may be captured. CudaError;
// std::invalid_argument.

// Puts a piece of the own area's bytes for slots, which are at `from` for the first rank of the world, or of the peers of
// the rail, and `step` further for each next one, into slot r of every rank of another node, or of these peers.
// Everything queued earlier on `stream` is put.
void put_far(const Workspace& workspace, const transport::WaitLimits& limits, std::uint64_t from,
             std::uint64_t step, const FarSlots& slots, std::uint32_t piece, cudaStream_t stream);

// Sets the flags of data that other nodes put, slots by slots, and of these piece by piece.
void land_far(const Workspace& workspace, const transport::WaitLimits& limits,
              const Landing& landing, cudaStream_t stream);

}  // namespace mkernel::cuda
