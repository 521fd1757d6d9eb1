// The ladder by which memory is registered with a device:
//
//   host memory    ibv_reg_mr
//   device memory  its dmabuf, where there is one and the device takes it: ibv_reg_dmabuf_mr
//                  else, where the peermem module is loaded: ibv_reg_mr of the device's address
//                  else a SetupError that names both
//
// A dmabuf is exported in whole granules, so memory lies at an offset in it. The I/O address is the
// memory's own, so that keys are used with addresses alike on every rung; the two must agree modulo
// a page. The kernel keeps the dmabuf: its descriptor may be closed once the memory is registered.
// Regions are strictly ordered (no IBV_ACCESS_RELAXED_ORDERING).
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

#include "backends/nics/nic.hpp"
#include "backends/nics/verbs/rail.hpp"

namespace mkernel::nics::verbs {

enum class Rung { host, dmabuf, peermem };

struct Registered {
    std::shared_ptr<ibv_mr> mr;
    Rung rung = Rung::host;
};

// `peermem`: the kernel module that lets ibv_reg_mr take a GPU's addresses is loaded. SetupError.
Registered register_with(const Rail& rail, std::uint32_t region, const LocalMemory& memory,
                         bool peermem);

}  // namespace mkernel::nics::verbs
