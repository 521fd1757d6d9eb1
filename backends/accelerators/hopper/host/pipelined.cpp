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

// Whether another rank is on it.
bool shares_device(int device, const World& world) {
    for (int rank = 0; rank < static_cast<int>(world.regions.size()); ++rank) {
        if (rank != world.rank && device_of(world.regions[rank]) == device) return true;
    }
    return false;
}

}  // namespace

PipelinedGather::PipelinedGather(int device, CallOrder& order, World world, Product product,
                                 Chunks chunks)
    : device_(device),
      order_(order),
      world_(std::move(world)),
      product_(product),
      chunks_(chunks),
      copies_first_(shares_device(device, world_)) {}

void PipelinedGather::start(const CallOnce& call) {
    const DeviceScope scope(device_);
    take_over(call, world_, product_);
    const bool several = world_.regions.size() > 1;
    const std::uint64_t row_bytes = static_cast<std::uint64_t>(product_.k) * kElementBytes;
    const bool copied = several && chunks_.push_blocks == 0;
    if (!copied || copies_first_) {
        if (copied) push_rows(world_, call.a, row_bytes, chunks_, call.stream);
        all_gather_gemm(world_, product_, chunks_, several, call.stream);
        return;
    }
    const auto stream = reinterpret_cast<cudaStream_t>(call.stream);
    const auto beside = reinterpret_cast<std::uint64_t>(order_.fork(stream));
    try {
        push_rows(world_, call.a, row_bytes, chunks_, beside);
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
