#include "backends/accelerators/cuda/memory.hpp"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

namespace {

int attribute(CUdevice_attribute which, int device) {
    int value = 0;
    check(driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
}

std::string on_device(const char* call, std::size_t nbytes, int device) {
    return std::string(call) + " of " + std::to_string(nbytes) + " bytes on device " +
           std::to_string(device);
}

class Allocations {
  public:
    void add(const OwnAllocation& made) {
        const std::lock_guard lock(mutex_);
        by_address_[made.address] = made;
    }
    void remove(std::uint64_t address) {
        const std::lock_guard lock(mutex_);
        by_address_.erase(address);
    }
    std::optional<OwnAllocation> find(std::uint64_t address, std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        auto found = by_address_.upper_bound(address);
        if (found == by_address_.begin()) return std::nullopt;
        const OwnAllocation& each = (--found)->second;
        const std::uint64_t at = address - each.address;
        if (at > each.bytes || bytes > each.bytes - at) return std::nullopt;
        return each;
    }
    // Returns the device of any of them; -1: there is none.
    int device() {
        const std::lock_guard lock(mutex_);
        return by_address_.empty() ? -1 : by_address_.begin()->second.device;
    }

  private:
    std::mutex mutex_;
    std::map<std::uint64_t, OwnAllocation> by_address_;
};

// Never destroyed: memory may be freed while the process ends.
Allocations& allocations() {
    static auto* all = new Allocations;
    return *all;
}

// A stream of its own, so that work of the user's is not waited for.
class OwnStream {
  public:
    OwnStream() {
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
              "cudaStreamCreateWithFlags");
    }
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;
    ~OwnStream() { cudaStreamDestroy(stream_); }

    [[nodiscard]] cudaStream_t get() const { return stream_; }
    void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace

DeviceMemory DeviceMemory::create(int device, std::size_t nbytes) {
    const OutsideCapture outside;
    const DeviceScope scope(device);
    check(cudaFree(nullptr), "making a context on device " + std::to_string(device));
    if (attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) == 0) {
        throw CudaError("device " + std::to_string(device), CUDA_ERROR_NOT_SUPPORTED,
                        "memory cannot be shared as a file descriptor here");
    }
    DeviceMemory made;
    made.device_ = device;
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const bool rdma =
        attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) != 0;
    wanted.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
    std::size_t granularity = 0;
    check(driver().mem_get_allocation_granularity(&granularity, &wanted,
                                                  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    made.mapped_ = (nbytes + granularity - 1) / granularity * granularity;
    check(driver().mem_create(&made.handle_, made.mapped_, &wanted, 0),
          on_device("cuMemCreate", made.mapped_, device));
    made.has_handle_ = true;
    made.map(granularity);
    made.zero();
    made.is_own_ = true;
    allocations().add({made.address_, made.mapped_, made.handle_, device});
    return made;
}

DeviceMemory DeviceMemory::attach(int device, int fd, std::size_t mapped) {
    const OutsideCapture outside;
    const DeviceScope scope(device);
    check(cudaFree(nullptr), "making a context on device " + std::to_string(device));
    DeviceMemory made;
    made.device_ = device;
    made.mapped_ = mapped;
    check(driver().mem_import_from_shareable_handle(
              &made.handle_, reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd)),
              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle");
    made.has_handle_ = true;
    made.map(0);
    return made;
}

void DeviceMemory::map(std::size_t alignment) {
    check(driver().mem_address_reserve(&address_, mapped_, alignment, 0, 0),
          on_device("cuMemAddressReserve", mapped_, device_));
    check(driver().mem_map(address_, mapped_, 0, handle_, 0),
          on_device("cuMemMap", mapped_, device_));
    is_mapped_ = true;
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(driver().mem_set_access(address_, mapped_, &access, 1),
          on_device("cuMemSetAccess", mapped_, device_));
}

void DeviceMemory::zero() const {
    const OwnStream stream;
    check(cudaMemsetAsync(reinterpret_cast<void*>(address_), 0, mapped_, stream.get()),
          on_device("cudaMemsetAsync", mapped_, device_));
    stream.wait();
}

void DeviceMemory::write_word(std::size_t offset, std::uint64_t value) const {
    if (offset % sizeof(value) != 0 || offset + sizeof(value) > mapped_) {
        throw std::out_of_range("no word at offset " + std::to_string(offset) + " of " +
                                std::to_string(mapped_) + " bytes");
    }
    const OutsideCapture outside;
    const DeviceScope scope(device_);
    const OwnStream stream;
    check(cudaMemcpyAsync(reinterpret_cast<void*>(address_ + offset), &value, sizeof(value),
                          cudaMemcpyHostToDevice, stream.get()),
          "cudaMemcpyAsync of a word");
    stream.wait();
}

int DeviceMemory::export_fd() const {
    int fd = -1;
    check(driver().mem_export_to_shareable_handle(&fd, handle_,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "cuMemExportToShareableHandle");
    return fd;
}

int DeviceMemory::export_dmabuf() const {
    const DeviceScope scope(device_);
    int fd = -1;
    check(driver().mem_get_handle_for_address_range(&fd, address_, mapped_,
                                                    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
          on_device("cuMemGetHandleForAddressRange (dmabuf)", mapped_, device_));
    return fd;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      is_own_(std::exchange(other.is_own_, false)),
      has_handle_(std::exchange(other.has_handle_, false)),
      is_mapped_(std::exchange(other.is_mapped_, false)),
      handle_(other.handle_),
      address_(std::exchange(other.address_, 0)),
      mapped_(other.mapped_) {}

DeviceMemory::~DeviceMemory() {
    unmap();
}

void DeviceMemory::unmap() noexcept {
    const OutsideCapture outside;
    if (is_own_) allocations().remove(address_);
    // No caller could be told of a failure here, and the process's end frees the memory too.
    if (is_mapped_) driver().mem_unmap(address_, mapped_);
    if (address_ != 0) driver().mem_address_free(address_, mapped_);
    if (has_handle_) driver().mem_release(handle_);
    is_own_ = is_mapped_ = has_handle_ = false;
    address_ = 0;
}

std::optional<OwnAllocation> find_own(std::uint64_t address, std::size_t bytes) {
    return allocations().find(address, bytes);
}

int device_of_own() {
    return allocations().device();
}

}  // namespace mkernel::cuda
