#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"

#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"

namespace mkernel::hopper {

namespace {

void take_over(const CallOnce& call, DeviceWorld& world, Product& product) {
    world.call = call.number;
    world.timeout_s = call.timeout_s;
    product.tensors = call.tensors;
}

}  // namespace

PipelinedGather::PipelinedGather(int device, CallOrder& order, DeviceWorld world, Product product,
                                 AllGatherSchedule schedule)
    : device_(device),
      order_(order),
      world_(std::move(world)),
      product_(product),
      schedule_(schedule),
      copies_first_(shares_device(device, world_)) {}

void PipelinedGather::start(const CallOnce& call) {
    const cuda::DeviceScope scope(device_);
    take_over(call, world_, product_);
    const bool several = world_.workspaces.size() > 1;
    const std::uint64_t row_bytes = std::uint64_t{1} * product_.k * operand_bytes(product_.scaling);
    const bool copied = several && schedule_.push_blocks == 0;
    const auto push = [&](std::uint64_t stream) {
        push_rows(world_, call.tensors.a, row_bytes, schedule_, stream,
                  row_scales(product_, schedule_.rows));
    };
    if (!copied || copies_first_) {
        if (copied) push(call.stream);
        all_gather_gemm(world_, product_, schedule_, several, call.stream);
        return;
    }
    const std::uint64_t beside = order_.fork(call.stream);
    try {
        push(beside);
        all_gather_gemm(world_, product_, schedule_, true, call.stream);
    } catch (...) {
        order_.join(call.stream);
        throw;
    }
    order_.join(call.stream);
}

PipelinedReduce::PipelinedReduce(int device, DeviceWorld world, Product product,
                                 ReduceSchedule schedule, Outputs outputs)
    : device_(device),
      world_(std::move(world)),
      product_(product),
      schedule_(std::move(schedule)),
      outputs_(std::move(outputs)) {}

void PipelinedReduce::start(const CallOnce& call, const std::vector<std::uint64_t>& outs) {
    const cuda::DeviceScope scope(device_);
    take_over(call, world_, product_);
    schedule_.outs = outs;
    schedule_.landings = outputs_.landings(call.tensors.out);
    gemm_reduce(world_, product_, schedule_, call.stream);
}

}  // namespace mkernel::hopper
