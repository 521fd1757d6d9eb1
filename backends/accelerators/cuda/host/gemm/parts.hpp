// Exchanges around a library's products, part by part: what ranks of a node put into each other's memory.
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/host/device_world.hpp"

namespace mkernel::cuda {

// The flag of a part that needs no flag of its own.
inline constexpr std::int64_t kNoFlag = -1;

// Copies `nbytes` from `src` to `to`, an address of rank `peer`'s memory as it is mapped here, and then the
// epoch into flag `flag` of that rank, unless it is kNoFlag. On the copy engines; `stream` must come after
// the end of the previous call. std::invalid_argument; CudaError.
void push_part(const DeviceWorld& world, int peer, std::uint64_t src, std::uint64_t nbytes,
               std::uint64_t to, std::int64_t flag, std::uint64_t stream);

// Loads all kernels of such exchanges to the current device, before the first call between nodes
// (host/moe/ops.hpp: load). CudaError.
void load_parts();

}  // namespace mkernel::cuda
