// Symmetric device memory: allocated here for peers to map, or a mapping of a peer's.
//
// The memory lives as long as any process maps it: kernels that store to a peer whose process was killed
// store to valid memory until they unmap it themselves.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace mkernel::cuda {

class DeviceMemory {
  public:
    // Allocates zeroed memory on `device`, at least `nbytes` (rounded up to pages of 2 MiB), which RDMA NICs
    // can register where the device can do that at all.
    static DeviceMemory create(int device, std::size_t nbytes);

    // Maps for kernels of `device` the memory of `fd` (a peer's export_fd; it stays the caller's). `mapped`:
    // the peer's mapped_bytes().
    static DeviceMemory attach(int device, int fd, std::size_t mapped);

    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&& other) = delete;
    // Unmaps. No kernel or copy may use the address any more.
    ~DeviceMemory();

    [[nodiscard]] std::uint64_t address() const { return address_; }
    [[nodiscard]] std::size_t mapped_bytes() const { return mapped_; }
    [[nodiscard]] int device() const { return device_; }

    // Writes a word for the device and its peers to find; returns when it is there.
    void write_word(std::size_t offset, std::uint64_t value) const;

    // Returns a new descriptor, the caller's to close, that another process of this host can attach.
    [[nodiscard]] int export_fd() const;
    // Returns a new dmabuf descriptor, the caller's to close, of all mapped bytes.
    [[nodiscard]] int export_dmabuf() const;

  private:
    DeviceMemory() = default;
    void map(std::size_t alignment);
    void zero() const;
    void unmap() noexcept;

    int device_ = 0;
    bool is_own_ = false;  // made here
    bool has_handle_ = false;
    bool is_mapped_ = false;
    CUmemGenericAllocationHandle handle_ = 0;
    CUdeviceptr address_ = 0;
    std::size_t mapped_ = 0;
};

// An allocation that DeviceMemory::create made, while it lives.
struct OwnAllocation {
    std::uint64_t address = 0;
    std::size_t bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
    int device = 0;
};
// Returns the allocation that has all of the range. Any thread.
std::optional<OwnAllocation> find_own(std::uint64_t address, std::size_t bytes);
// Returns the device of the first allocation; -1: there is none.
int device_of_own();

}  // namespace mkernel::cuda
