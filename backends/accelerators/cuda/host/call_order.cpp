#include "backends/accelerators/cuda/host/call_order.hpp"

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

unsigned long long capture_of(std::uint64_t stream) {
    cudaStreamCaptureStatus status{};
    unsigned long long id = 0;
    cuda::check(cudaStreamGetCaptureInfo(cuda::stream_at(stream), &status, &id),
                "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

namespace {

cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                "cudaEventCreateWithFlags");
    return event;
}

void record(cudaEvent_t event, std::uint64_t stream) {
    cuda::check(cudaEventRecord(event, cuda::stream_at(stream)), "cudaEventRecord");
}

void wait(std::uint64_t stream, cudaEvent_t event) {
    cuda::check(cudaStreamWaitEvent(cuda::stream_at(stream), event, 0), "cudaStreamWaitEvent");
}

}  // namespace

CallOrder::CallOrder(int device) {
    const cuda::DeviceScope scope(device);
    int least = 0;
    int greatest = 0;
    cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                "cudaDeviceGetStreamPriorityRange");
    cuda::check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreateWithPriority");
    cuda::check(cudaStreamCreateWithPriority(&kernels_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreateWithPriority");
    forked_ = make_event();
    joined_ = make_event();
    captured_ = make_event();
    for (cudaEvent_t& event : events_) event = make_event();
}

CallOrder::~CallOrder() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    for (const cudaEvent_t event : {forked_, joined_, captured_}) cudaEventDestroy(event);
    for (const cudaStream_t stream : {side_, kernels_}) cudaStreamDestroy(stream);
}

void CallOrder::begin(std::uint64_t stream) {
    capturing_ = capture_of(stream);
    if (capturing_ != 0) {
        if (capturing_ == capture_) wait(stream, captured_);
        return;
    }
    if (fifo_ != nullptr) fifo_->await_device();
    if (calls_ != 0 && stream != last_stream_) wait(stream, event_of(calls_));
}

std::uint64_t CallOrder::fork(std::uint64_t stream) {
    return forked(stream, side_);
}

void CallOrder::join(std::uint64_t stream) {
    joined(stream, side_);
}

std::uint64_t CallOrder::fork_kernels(std::uint64_t stream) {
    return forked(stream, kernels_);
}

void CallOrder::join_kernels(std::uint64_t stream) {
    joined(stream, kernels_);
}

std::uint64_t CallOrder::forked(std::uint64_t stream, cudaStream_t other) const {
    const auto to = reinterpret_cast<std::uint64_t>(other);
    record(forked_, stream);
    wait(to, forked_);
    return to;
}

void CallOrder::joined(std::uint64_t stream, cudaStream_t other) const {
    record(joined_, reinterpret_cast<std::uint64_t>(other));
    wait(stream, joined_);
}

std::uint64_t CallOrder::end(std::uint64_t stream) {
    if (capturing_ != 0) {
        record(captured_, stream);
        capture_ = capturing_;
        return 0;
    }
    record(event_of(calls_ + 1), stream);
    last_stream_ = stream;
    return ++calls_;
}

bool CallOrder::finished(std::uint64_t call) const {
    if (call == 0) return true;
    const cuda::OutsideCapture outside;
    const cudaError_t found = cudaEventQuery(events_[call % kEvents]);
    if (found == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    cuda::check(found, "a call's kernels");
    return true;
}

}  // namespace mkernel::cuda
