// Slots of other nodes (kernels/moe/far_slots.hpp) as the host fills them.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/cuda/kernels/moe/far_slots.hpp"

namespace mkernel::cuda {

// Copies `nbytes` at `from` to `outbox`, an offset of the own area from which they can be put. `stream` must
// come after the end of the previous call. CudaError.
void fill_outbox(const DeviceWorld& world, std::uint64_t from, std::uint64_t nbytes,
                 std::uint64_t outbox, std::uint64_t stream);

// Copies `slots.bytes` at `from` into the own slot, one piece, and puts that to every rank of another node. `stream` must
// come after the end of the previous call. CudaError.
void send_far(const DeviceWorld& world, std::uint64_t from, const FarSlots& slots,
              std::uint64_t stream);

// Puts a piece of the contents of the outbox, which has `slots.bytes` for each rank of the world, to the ranks of other
// nodes. CudaError.
void send_outbox(const DeviceWorld& world, std::uint64_t outbox, const FarSlots& slots,
                 std::uint64_t stream, std::uint32_t piece = 0);

// Sets the flags of slots when other nodes' data has arrived in them. CudaError; std::invalid_argument.
void land_far(const DeviceWorld& world, const std::vector<FarSlots>& slots, std::uint64_t stream);

}  // namespace mkernel::cuda
