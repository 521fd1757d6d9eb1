// A plan's pipelined calls in one world, the view that a product runs again and again. Everything that stays
// the same from call to call is computed beforehand, so that starting a call costs the host little.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "backends/accelerators/cuda/host/call_order.hpp"
#include "backends/accelerators/cuda/host/collectives/landing.hpp"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/host/gemm/fused.hpp"

namespace mkernel::hopper {

// The values that a call brings. `product`'s other members are those of the plan.
struct CallOnce {
    std::uint32_t number;
    double timeout_s;
    GemmTensors tensors;
    std::uint64_t stream;
};

// AllGather+GEMM. Where blocks of the kernel do not push the rows themselves (`schedule.push_blocks`),
// copies do: on the second stream of `order`, which must outlive this; where a peer is on the same
// device, before the kernel. Copies within a device need room on its multiprocessors, and a kernel
// that has all of them and waits for its peers would keep them from starting.
class PipelinedGather {
  public:
    PipelinedGather(int device, CallOrder& order, DeviceWorld world, Product product,
                    AllGatherSchedule schedule);

    void start(const CallOnce& call);

  private:
    int device_;
    CallOrder& order_;
    DeviceWorld world_;
    Product product_;
    AllGatherSchedule schedule_;
    bool copies_first_;
};

// GEMM+ReduceScatter or GEMM+AllReduce.
class PipelinedReduce {
  public:
    PipelinedReduce(int device, DeviceWorld world, Product product, ReduceSchedule schedule,
                    Outputs outputs = {});

    // `outs`: every rank's `out` by rank, where AllReduce's is symmetric; otherwise none, and the ranks
    // publish where theirs are.
    void start(const CallOnce& call, const std::vector<std::uint64_t>& outs);

  private:
    int device_;
    DeviceWorld world_;
    Product product_;
    ReduceSchedule schedule_;
    Outputs outputs_;
};

}  // namespace mkernel::hopper
