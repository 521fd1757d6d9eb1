#include "backends/accelerators/cuda/host/moe/far_slots.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

void fill_outbox(const DeviceWorld& world, std::uint64_t from, std::uint64_t nbytes,
                 std::uint64_t outbox, std::uint64_t stream) {
    cuda::check(cudaMemcpyAsync(workspace_of(world).network.area + outbox,
                                reinterpret_cast<const void*>(from), nbytes, cudaMemcpyDefault,
                                cuda::stream_at(stream)),
                [&] { return "copying " + std::to_string(nbytes) + " bytes for other nodes"; });
}

void send_far(const DeviceWorld& world, std::uint64_t from, const FarSlots& slots,
              std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    const std::uint64_t own = slots.offset + workspace.rank * slots.bytes;
    fill_outbox(world, from, slots.bytes, own, stream);
    put_far(workspace, limits_of(world), own, 0, slots, 0, cuda::stream_at(stream));
}

void send_outbox(const DeviceWorld& world, std::uint64_t outbox, const FarSlots& slots,
                 std::uint64_t stream, std::uint32_t piece) {
    put_far(workspace_of(world), limits_of(world), outbox, slots.bytes, slots, piece,
            cuda::stream_at(stream));
}

void land_far(const DeviceWorld& world, const std::vector<FarSlots>& slots, std::uint64_t stream) {
    if (slots.size() > kMostFarSlots) {
        throw std::invalid_argument(std::to_string(slots.size()) + " kinds of slots; at most " +
                                    std::to_string(kMostFarSlots));
    }
    Landing landing{};
    std::copy(slots.begin(), slots.end(), landing.slots);
    landing.count = static_cast<std::int32_t>(slots.size());
    land_far(workspace_of(world), limits_of(world), landing, cuda::stream_at(stream));
}

}  // namespace mkernel::cuda
