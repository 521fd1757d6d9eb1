// Copies between any two addresses that this GPU can reach: its own memory, a peer's mapped here,
// pinned host memory. One interface, three engines.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mkernel::cuda::transfer {

enum class Engine : std::uint32_t {
    copy_engine = 0,  // no SM; best rate, late start. Within one GPU the driver runs a kernel
    bulk = 1,         // one thread a block through shared memory; few blocks fill a link
    plain = 2,        // all threads load and store; any misalignment
};

struct Effort {
    std::uint32_t blocks = 8;       // of the bulk and the plain engine
    std::uint32_t stage_bytes = 0;  // of the bulk engine, a multiple of 16; 0: by the size
};

inline constexpr std::uint32_t kMaxStageBytes = 24u << 10;

// Copies `nbytes` on `stream`, of the current device, which runs the copy: a put where `src` is its
// own, a get where `dst` is. Any size, any alignment; the bulk engine hands over to the plain one where source and
// destination do not lie alike within 16 bytes, and where it was not compiled for the device. The ranges must not
// overlap. Any thread; may be captured. CudaError; std::invalid_argument for an effort out of range.
void copy(void* dst, const void* src, std::uint64_t nbytes, Engine engine, Effort effort,
          cudaStream_t stream);

}  // namespace mkernel::cuda::transfer
