#include "backends/accelerators/hopper/host/attention.hpp"

#include <cuda_runtime_api.h>

#include <string>

#include "backends/cuda/device.hpp"
#include "backends/cuda/error.hpp"

namespace mkernel::hopper::attention {

std::uint64_t slot_offset(const Keys& keys, int world, int rank, int source) {
    const int slot = (rank - source + world) % world - 1;
    return 2 * keys.bytes * slot;
}

std::uint64_t workspace_bytes(const Keys& keys, int world) {
    return kDataOffset + 2 * keys.bytes * (world - 1);
}

void push_keys(const DeviceWorld& world, std::uint64_t k, std::uint64_t v, const Keys& keys,
               bool zigzag, std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    const cudaStream_t on = cuda::stream_at(stream);
    const auto copied = [](cudaError_t status, std::uint64_t nbytes, int peer) {
        cuda::check(status, [&] {
            return "copying " + std::to_string(nbytes) + " bytes to rank " + std::to_string(peer);
        });
    };
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        char* to = workspace.data(peer) + slot_offset(keys, workspace.world, peer, workspace.rank);
        for (const std::uint64_t each : {k, v}) {
            const auto* from = reinterpret_cast<const void*>(each);
            if (zigzag && peer > workspace.rank) {
                copied(cudaMemcpy2DAsync(to, keys.pitch, from, keys.pitch, keys.width, keys.count,
                                         cudaMemcpyDeviceToDevice, on),
                       keys.width * keys.count, peer);
            } else {
                copied(cudaMemcpyAsync(to, from, keys.bytes, cudaMemcpyDeviceToDevice, on),
                       keys.bytes, peer);
            }
            to += keys.bytes;
        }
        transport::SetWord* const flag = workspace.flags(peer) + workspace.rank;
        copied(cudaMemcpyAsync(flag, workspace.control().epochs, sizeof(transport::SetWord),
                               cudaMemcpyDeviceToDevice, on),
               sizeof(transport::SetWord), peer);
    }
}

}  // namespace mkernel::hopper::attention
