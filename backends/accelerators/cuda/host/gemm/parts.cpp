#include "backends/accelerators/cuda/host/gemm/parts.hpp"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/kernels/attention/parts.hpp"
#include "backends/accelerators/cuda/kernels/gemm/sum_parts.hpp"
#include "backends/accelerators/cuda/kernels/moe/far_slots.hpp"
#include "backends/accelerators/cuda/kernels/rendezvous.hpp"

namespace mkernel::cuda {

void push_part(const DeviceWorld& world, int peer, std::uint64_t src, std::uint64_t nbytes,
               std::uint64_t to, std::int64_t flag, std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    if (peer < 0 || peer >= workspace.world || peer == workspace.rank) {
        throw std::invalid_argument("rank " + std::to_string(peer) + " is no peer of rank " +
                                    std::to_string(workspace.rank));
    }
    if (flag < kNoFlag || flag >= static_cast<std::int64_t>(kFlags)) {
        throw std::invalid_argument("flag " + std::to_string(flag) + "; there are " +
                                    std::to_string(kFlags));
    }
    const auto copy = [&](void* dst, const void* from, std::uint64_t bytes) {
        cuda::check(
            cudaMemcpyAsync(dst, from, bytes, cudaMemcpyDeviceToDevice, cuda::stream_at(stream)),
            [&] {
                return "copying " + std::to_string(bytes) + " bytes to rank " +
                       std::to_string(peer);
            });
    };
    copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(src), nbytes);
    if (flag == kNoFlag) return;
    copy(workspace.flags(peer) + flag, workspace.control().epochs, sizeof(transport::SetWord));
}

void load_parts() {
    load_far_slots();
    attention::load();
    collectives::load_sum_parts();
    load_rendezvous();
}

}  // namespace mkernel::cuda
