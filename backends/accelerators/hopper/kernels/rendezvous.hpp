// A call that does nothing but end, on all ranks: it follows a call whose results are copied out of the
// workspace. The copies are done on every rank before any rank's next call writes there.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/accelerators/hopper/device/workspace.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

// Uses up an epoch. Queued on the current device's `stream`; may be captured. CudaError.
void rendezvous(const Workspace& workspace, const transport::WaitLimits& limits,
                cudaStream_t stream);

}  // namespace mkernel::hopper
