// The mover of this process's CUDA device, by which an emulated NIC reaches its memory (transport/mover.hpp).
//
// Copies run on copy engines, on streams and in a context of their own (lanes.hpp), so they pass kernels that
// run, whatever driver calls the rank makes meanwhile. Copies inside one device would wait for
// multiprocessors: between ranks of one device bytes go through pinned host memory. A batch ends with a word
// that the stream writes into host memory; checking it costs no driver call.
#pragma once

#include "backends/transport/mover.hpp"

namespace mkernel::cuda {

// Returns the mover of all devices of the process; valid until it ends. It moves memory of one of them: the
// one whose memory is exported first.
transport::Mover* mover();

// The abilities of a NIC with a device's memory.
struct GpuDirect {
    bool dmabuf = false;   // its memory exports as dmabufs
    bool ordered = false;  // its kernels see what a NIC wrote in the order of its completions
    bool flushes = false;  // a call of the host brings that about
};
GpuDirect gpu_direct(int device);

// Returns the flush that must be called before kernels of `device` see what a NIC wrote; null where they see
// it anyhow.
const transport::DeviceFlush* device_flush(int device);

}  // namespace mkernel::cuda
