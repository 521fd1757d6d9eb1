#include "backends/accelerators/hopper/host/gemm/gathered_copies.hpp"

#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"

namespace mkernel::hopper {

GatheredCopies::GatheredCopies(int device, DeviceWorld world, std::uint64_t row_bytes,
                               std::uint64_t scale_bytes, transfer::Engine engine,
                               std::uint32_t blocks)
    : device_(device),
      world_(std::move(world)),
      row_bytes_(row_bytes),
      scale_bytes_(scale_bytes),
      engine_(engine),
      effort_{.blocks = blocks} {}

void GatheredCopies::start(const CallOnce& call, std::uint64_t rows, std::uint64_t scales) {
    if (rows == 0 && scales == 0) return;
    const cuda::DeviceScope scope(device_);
    const cudaStream_t stream = cuda::stream_at(call.stream);
    const std::size_t ranks = world_.workspaces.size();
    const std::uint64_t landed = world_.workspaces[world_.rank] + kDataOffset;
    copy(call.tensors.a, landed, row_bytes_, rows, stream);
    copy(call.tensors.a_scale, landed + gathered_scales_at(ranks * row_bytes_), scale_bytes_,
         scales, stream);
    if (ranks == 1) return;
    world_.call = call.number;
    world_.timeout_s = call.timeout_s;
    rendezvous(world_, call.stream);
}

void GatheredCopies::copy(std::uint64_t own, std::uint64_t landed, std::uint64_t bytes,
                          std::uint64_t whole, cudaStream_t stream) const {
    if (whole == 0 || own == 0) return;
    const auto piece = [&](std::uint64_t from, std::uint64_t at, std::uint64_t nbytes) {
        if (nbytes == 0) return;
        transfer::copy(reinterpret_cast<void*>(whole + at), reinterpret_cast<const void*>(from),
                       nbytes, engine_, effort_, stream);
    };
    const std::uint64_t before = world_.rank * bytes, after = before + bytes;
    piece(own, before, bytes);
    piece(landed, 0, before);
    piece(landed + after, after, world_.workspaces.size() * bytes - after);
}

}  // namespace mkernel::hopper
