#include "backends/accelerators/cuda/host/attention/transfers.hpp"

#include "backends/accelerators/cuda/kernels/attention/crossing.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda::attention {

std::uint64_t slot_offset(const Keys& keys, int world, int local, int rank, int source) {
    return 2 * keys.bytes * slot_of(rank, source, world, local);
}

std::uint64_t gradient_offset(const Keys& keys, int world, int rank, int from) {
    const int slot = (from - rank + world) % world - 1;
    return 2 * keys.bytes * (world - 1 + slot);
}

std::uint64_t workspace_bytes(const Keys& keys, int world, bool gradients) {
    return kDataOffset + 2 * keys.bytes * (world - 1) * (gradients ? 2 : 1);
}

namespace {

void copied(cudaError_t status, std::uint64_t nbytes, int peer) {
    cuda::check(status, [&] {
        return "copying " + std::to_string(nbytes) + " bytes to rank " + std::to_string(peer);
    });
}

void copy(char* to, std::uint64_t from, std::uint64_t nbytes, int peer, cudaStream_t on) {
    copied(cudaMemcpyAsync(to, reinterpret_cast<const void*>(from), nbytes,
                           cudaMemcpyDeviceToDevice, on),
           nbytes, peer);
}

// Copies the first `width` bytes of each stretch of K, or of V.
void copy_stretches(char* to, std::uint64_t from, std::uint64_t width, const Keys& keys, int peer,
                    cudaStream_t on) {
    if (width == keys.pitch) {
        copy(to, from, keys.bytes, peer, on);
        return;
    }
    copied(cudaMemcpy2DAsync(to, keys.pitch, reinterpret_cast<const void*>(from), keys.pitch, width,
                             keys.count, cudaMemcpyDeviceToDevice, on),
           width * keys.count, peer);
}

// Sets the flag after the data that was copied to that peer.
void set_flag(const Workspace& workspace, int peer, std::uint32_t flag, cudaStream_t on) {
    copied(cudaMemcpyAsync(workspace.flags(peer) + flag, workspace.control().epochs,
                           sizeof(transport::SetWord), cudaMemcpyDeviceToDevice, on),
           sizeof(transport::SetWord), peer);
}

}  // namespace

void push_keys(const DeviceWorld& world, std::uint64_t k, std::uint64_t v, const Keys& keys,
               bool zigzag, std::uint64_t chunk, std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    const cudaStream_t on = cuda::stream_at(stream);
    const std::uint64_t chunks = chunk == 0 ? 0 : (keys.pitch + chunk - 1) / chunk;
    if (chunks == 0 || chunks * workspace.world > kFlags || workspace.far() > 0) {
        throw std::invalid_argument("chunks of " + std::to_string(chunk) + " bytes of " +
                                    std::to_string(keys.pitch) + "; there are " +
                                    std::to_string(kFlags) + " flags for all ranks, of one node");
    }
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + step) % workspace.world;
        char* const slot =
            workspace.data(peer) +
            slot_offset(keys, workspace.world, workspace.local, peer, workspace.rank);
        const std::uint64_t seen = zigzag && peer > workspace.rank ? keys.width : keys.pitch;
        auto flag = static_cast<std::uint32_t>(workspace.rank * chunks);
        for (std::uint64_t at = 0; at < seen; at += chunk) {
            const std::uint64_t width = std::min(chunk, seen - at);
            copy_stretches(slot + at, k + at, width, keys, peer, on);
            copy_stretches(slot + keys.bytes + at, v + at, width, keys, peer, on);
            set_flag(workspace, peer, flag++, on);
        }
    }
}

std::uint64_t area_bytes(const Keys& keys, int world) {
    return 2 * keys.bytes * world;
}

namespace {

void check_peer(const Workspace& workspace, int peer, std::uint32_t flag) {
    if (peer < 0 || peer >= workspace.world || peer == workspace.rank || flag >= kFlags) {
        throw std::invalid_argument(
            "flag " + std::to_string(flag) + " of rank " + std::to_string(peer) + "; at most " +
            std::to_string(kFlags - 1) + ", of a peer of rank " + std::to_string(workspace.rank));
    }
}

}  // namespace

void push_piece(const DeviceWorld& world, int peer, std::uint64_t k, std::uint64_t v,
                const Piece& piece, std::uint64_t place, std::uint32_t flag, std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    check_peer(workspace, peer, flag);
    const cudaStream_t on = cuda::stream_at(stream);
    char* to = workspace.data(peer) + place;
    for (const std::uint64_t each : {k, v}) {
        const std::uint64_t bytes = piece.width * piece.count;
        copied(
            cudaMemcpy2DAsync(to, piece.width, reinterpret_cast<const void*>(each + piece.at),
                              piece.pitch, piece.width, piece.count, cudaMemcpyDeviceToDevice, on),
            bytes, peer);
        to += bytes;
    }
    set_flag(workspace, peer, flag, on);
}

void tell(const DeviceWorld& world, int peer, std::uint32_t flag, std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    check_peer(workspace, peer, flag);
    set_flag(workspace, peer, flag, cuda::stream_at(stream));
}

void push_gradients(const DeviceWorld& world, int owner, std::uint64_t of_k, std::uint64_t of_v,
                    std::uint64_t bytes, const Keys& keys, std::uint64_t place, std::uint32_t flag,
                    std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    check_peer(workspace, owner, flag);
    if (place > keys.bytes || bytes > keys.bytes - place) {
        throw std::invalid_argument(std::to_string(bytes) + " bytes of gradients at " +
                                    std::to_string(place) + " for rank " + std::to_string(owner) +
                                    "; there are " + std::to_string(keys.bytes));
    }
    const cudaStream_t on = cuda::stream_at(stream);
    char* const to = workspace.data(owner) +
                     gradient_offset(keys, workspace.world, owner, workspace.rank) + place;
    copy(to, of_k, bytes, owner, on);
    copy(to + keys.bytes, of_v, bytes, owner, on);
    set_flag(workspace, owner, flag, on);
}

}  // namespace mkernel::cuda::attention
