#include "backends/accelerators/hopper/host/gemm/gathered_copies.hpp"

#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"

namespace mkernel::hopper {

namespace {

// Adds copies to `whole`: of the `rank`-th rank's own bytes, and of the others', which lie at `landed`.
void add(LastCopies& copies, const DeviceWorld& world, std::uint64_t own, std::uint64_t landed,
         std::uint64_t bytes, std::uint64_t whole) {
    if (whole == 0 || own == 0) return;
    const std::uint64_t before = world.rank * bytes, after = before + bytes;
    copies.add(whole + before, own, bytes);
    copies.add(whole, landed, before);
    copies.add(whole + after, landed + after, world.workspaces.size() * bytes - after);
}

}  // namespace

GatheredCopies::GatheredCopies(int device, DeviceWorld world, std::uint64_t row_bytes,
                               std::uint64_t scale_bytes)
    : device_(device), world_(std::move(world)), row_bytes_(row_bytes), scale_bytes_(scale_bytes) {}

void GatheredCopies::start(const CallOnce& call, std::uint64_t rows, std::uint64_t scales) {
    const cuda::DeviceScope scope(device_);
    const std::uint64_t landed = world_.workspaces[world_.rank] + kDataOffset;
    const std::uint64_t scales_at = gathered_scales_at(world_.workspaces.size() * row_bytes_);
    LastCopies copies;
    add(copies, world_, call.tensors.a, landed, row_bytes_, rows);
    add(copies, world_, call.tensors.a_scale, landed + scales_at, scale_bytes_, scales);
    if (copies.count == 0) return;
    world_.call = call.number;
    world_.timeout_s = call.timeout_s;
    rendezvous(workspace_of(world_), limits_of(world_), copies, cuda::stream_at(call.stream));
}

}  // namespace mkernel::hopper
