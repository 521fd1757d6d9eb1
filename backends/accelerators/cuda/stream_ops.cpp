#include "backends/accelerators/cuda/stream_ops.hpp"

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

namespace {

// Returns true where the device may reorder remote writes: data that peers wrote before the word must be
// visible after the wait.
bool reorders_remote_writes(int device) {
    int can_flush = 0;
    check(driver().device_get_attribute(&can_flush, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
                                        device),
          "cuDeviceGetAttribute");
    return can_flush != 0;
}

}  // namespace

MappedPages::MappedPages(std::uint64_t address, std::size_t nbytes)
    : address_(reinterpret_cast<void*>(address)) {
    constexpr unsigned kFlags = cudaHostRegisterMapped | cudaHostRegisterPortable;
    check(cudaHostRegister(address_, nbytes, kFlags), "cudaHostRegister");
    void* mapped = nullptr;
    const cudaError_t found = cudaHostGetDevicePointer(&mapped, address_, 0);
    if (found == cudaSuccess && mapped == address_) return;
    cudaHostUnregister(address_);
    check(found, "cudaHostGetDevicePointer");
    throw CudaError("cudaHostRegister", cudaErrorNotSupported,
                    "the device has other addresses for host memory");
}

MappedPages::~MappedPages() {
    cudaHostUnregister(address_);
}

void copy(std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes, std::uint64_t stream) {
    check(cudaMemcpyAsync(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes,
                          cudaMemcpyDefault, stream_at(stream)),
          "cudaMemcpyAsync");
}

void write_word(std::uint64_t address, std::uint64_t value, std::uint64_t stream) {
    // By default the write comes with a fence of the whole system.
    check(driver().stream_write_value(stream_at(stream), address, value,
                                      CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
}

void wait_word(int device, std::uint64_t address, std::uint64_t value, std::uint64_t stream) {
    unsigned flags = CU_STREAM_WAIT_VALUE_GEQ;
    if (reorders_remote_writes(device)) flags |= CU_STREAM_WAIT_VALUE_FLUSH;
    check(driver().stream_wait_value(stream_at(stream), address, value, flags),
          "cuStreamWaitValue64");
}

}  // namespace mkernel::cuda
