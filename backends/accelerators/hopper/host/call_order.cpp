#include "backends/accelerators/hopper/host/call_order.hpp"

#include "backends/cuda/device.hpp"
#include "backends/cuda/error.hpp"

namespace mkernel::hopper {

namespace {

// Identifies the capture that `stream` is part of; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    unsigned long long id = 0;
    cuda::check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

cudaEvent_t make_event() {
    cudaEvent_t event = nullptr;
    cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                "cudaEventCreateWithFlags");
    return event;
}

void order(cudaEvent_t event, cudaStream_t after, cudaStream_t stream) {
    cuda::check(cudaEventRecord(event, after), "cudaEventRecord");
    cuda::check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

}  // namespace

CallOrder::CallOrder(int device) : device_(device) {
    const cuda::DeviceScope scope(device);
    int least = 0;
    int greatest = 0;
    cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                "cudaDeviceGetStreamPriorityRange");
    cuda::check(cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreateWithPriority");
    forked_ = make_event();
    joined_ = make_event();
    captured_ = make_event();
    for (cudaEvent_t& event : events_) event = make_event();
}

CallOrder::~CallOrder() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    for (const cudaEvent_t event : {forked_, joined_, captured_}) cudaEventDestroy(event);
    cudaStreamDestroy(side_);
}

void CallOrder::begin(cudaStream_t stream) {
    capturing_ = capture_of(stream);
    if (capturing_ != 0) {
        if (capturing_ == capture_) {
            cuda::check(cudaStreamWaitEvent(stream, captured_, 0), "cudaStreamWaitEvent");
        }
        return;
    }
    if (calls_ != 0 && stream != last_stream_) {
        cuda::check(cudaStreamWaitEvent(stream, event_of(calls_), 0), "cudaStreamWaitEvent");
    }
}

cudaStream_t CallOrder::fork(cudaStream_t stream) {
    order(forked_, stream, side_);
    return side_;
}

void CallOrder::join(cudaStream_t stream) {
    order(joined_, side_, stream);
}

std::uint64_t CallOrder::end(cudaStream_t stream) {
    if (capturing_ != 0) {
        cuda::check(cudaEventRecord(captured_, stream), "cudaEventRecord");
        capture_ = capturing_;
        return 0;
    }
    cuda::check(cudaEventRecord(event_of(calls_ + 1), stream), "cudaEventRecord");
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

}  // namespace mkernel::hopper
