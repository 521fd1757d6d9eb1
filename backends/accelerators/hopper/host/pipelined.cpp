#include "backends/accelerators/hopper/host/pipelined.hpp"

#include <utility>

#include "backends/accelerators/hopper/host/device.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"

namespace mkernel::hopper {

namespace {

void take_over(const CallOnce& call, World& world, Product& product) {
    world.call = call.number;
    world.timeout_s = call.timeout_s;
    product.a = call.a;
    product.b = call.b;
    product.out = call.out;
}

}  // namespace

PipelinedGather::PipelinedGather(int device, CallOrder& order, World world, Product product,
                                 Chunks chunks)
    : device_(device),
      order_(order),
      world_(std::move(world)),
      product_(product),
      chunks_(chunks) {}

void PipelinedGather::start(const CallOnce& call) {
    const DeviceScope scope(device_);
    take_over(call, world_, product_);
    const bool several = world_.regions.size() > 1;
    if (!several || chunks_.push_blocks != 0) {
        all_gather_gemm(world_, product_, chunks_, several, call.stream);
        return;
    }
    const auto stream = reinterpret_cast<cudaStream_t>(call.stream);
    const auto beside = reinterpret_cast<std::uint64_t>(order_.fork(stream));
    try {
        push_rows(world_, call.a, product_.k * kElementBytes, chunks_, beside);
        all_gather_gemm(world_, product_, chunks_, true, call.stream);
    } catch (...) {
        order_.join(stream);
        throw;
    }
    order_.join(stream);
}

PipelinedReduce::PipelinedReduce(int device, World world, Product product, Owners owners)
    : device_(device), world_(std::move(world)), product_(product), owners_(std::move(owners)) {}

void PipelinedReduce::start(const CallOnce& call, const std::vector<std::uint64_t>& outs) {
    const DeviceScope scope(device_);
    take_over(call, world_, product_);
    owners_.outs = outs;
    gemm_reduce(world_, product_, owners_, call.stream);
}

}  // namespace mkernel::hopper
