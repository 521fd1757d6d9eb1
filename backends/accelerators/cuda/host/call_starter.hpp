// Starts calls of one plan without Python: the backend's side of contracts/call_starter.h. The
// plan's executor makes one for each way of laying out `out`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backends/accelerators/cuda/host/call_order.hpp"
#include "backends/accelerators/cuda/kernels/prefetch.hpp"
#include "backends/contracts/call_starter.h"

namespace mkernel::cuda {

// The tensors of a call, as STARTED of starters.py names them; a call has some of them. AllReduce's x is
// kA.
enum : int {
    kA,
    kB,
    kBias,
    kOut,
    kAScale,
    kBScale,
    kGathered,
    kGatheredScale,
    kNormWeight,
    kResidual,
    kResidualOut,
    kPrefetch,
    kQuantised,
    kQuantisedScale,
};

class CallStarter {
  public:
    // Takes the world's CallOrder, which it keeps.
    CallStarter(int device, pybind11::object order);
    virtual ~CallStarter() = default;
    CallStarter(const CallStarter&) = delete;
    CallStarter& operator=(const CallStarter&) = delete;

    // Starts a call as the contract's `start` does, with the GIL held. Throws what the work throws.
    MkernelCallResult start(const MkernelCall& call);

    // Returns the capsule that the contract requires, which owns the starter.
    static pybind11::object capsule(std::unique_ptr<CallStarter> starter);
    // Has the starter of a capsule prefetch so many bytes of the tensor kPrefetch in each call.
    static void prefetch_in(const pybind11::capsule& starter, std::uint32_t nbytes);

  protected:
    // Queues the call's work, between the world's calls before and after it. The caller holds the GIL.
    virtual void queue(const MkernelCall& call) = 0;

    // Returns the bytes that the kernels of a call prefetch.
    [[nodiscard]] Prefetch prefetch(const MkernelCall& call) const {
        return Prefetch::of(call.addresses[kPrefetch], prefetched_bytes_);
    }
    [[nodiscard]] int device() const { return device_; }
    [[nodiscard]] CallOrder& order() { return order_; }

  private:
    int device_;
    pybind11::object kept_order_;
    CallOrder& order_;
    std::uint32_t prefetched_bytes_ = 0;
};

// Returns the number of a call as kernels note it: the low 32 bits.
inline std::uint32_t call_number(const MkernelCall& call) {
    return static_cast<std::uint32_t>(call.number);
}

}  // namespace mkernel::cuda
