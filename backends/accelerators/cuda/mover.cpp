#include "backends/accelerators/cuda/mover.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/driver.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/lanes.hpp"
#include "backends/accelerators/cuda/memory.hpp"

namespace mkernel::cuda {
namespace {

std::string pci_of(int device) {
    char name[32] = {};
    check(cudaDeviceGetPCIBusId(name, sizeof(name), device), "cudaDeviceGetPCIBusId");
    return name;
}

int attribute(CUdevice_attribute which, int device) {
    int value = 0;
    check(driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
}

// ---- the mover

class CudaMover {
  public:
    static CudaMover& get() {
        static auto* made =
            new CudaMover;  // never destroyed: memory may be freed as the process ends
        return *made;
    }
    transport::Mover* table() { return &table_; }

    int flush(int device) {
        return guarded([&] {
            if (gpu_direct(device).flushes) flush_writes(device);
            if (auto* flushed = table_.flushed.load(std::memory_order_acquire)) flushed();
            return 0;
        });
    }
    // Returns true where an emulated NIC needs flushes.
    [[nodiscard]] bool wants_flushes() const { return table_.flushed.load() != nullptr; }

  private:
    struct Attached {
        std::unique_ptr<DeviceMemory> memory;
        bool same_device = false;
    };

    CudaMover() {
        table_.self = this;
        table_.owns = [](void*, std::uint64_t address, std::uint64_t bytes) {
            return find_own(address, bytes) ? 1 : 0;
        };
        table_.export_memory = [](void* self, std::uint64_t address, std::uint64_t bytes,
                                  transport::ExportedMemory* exported, int* fd) {
            return of(self).locked(
                [&](CudaMover& m) { return m.export_memory(address, bytes, *exported, *fd); });
        };
        table_.attach = [](void* self, const transport::ExportedMemory* exported, int fd,
                           std::uint64_t* address) {
            return of(self).locked([&](CudaMover& m) { return m.attach(*exported, fd, *address); });
        };
        table_.detach = [](void* self, std::uint64_t address) {
            of(self).locked([&](CudaMover& m) { return m.detach(address); });
        };
        table_.copy = [](void* self, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
            return of(self).locked([&](CudaMover& m) { return m.copy(to, from, bytes); });
        };
        table_.submit = [](void* self, std::uint64_t* ticket) {
            return of(self).locked([&](CudaMover& m) {
                *ticket = m.lanes().submit();
                return 0;
            });
        };
        table_.done = [](void* self, std::uint64_t ticket) {
            return of(self).locked([&](CudaMover& m) { return m.lanes().done(ticket) ? 1 : 0; });
        };
    }
    static CudaMover& of(void* self) { return *static_cast<CudaMover*>(self); }

    // Calls `act` and throws nothing into the caller, which knows of no CUDA; the caller reports that its
    // device failed.
    template <typename Do>
    static int guarded(Do act) noexcept {
        try {
            return act();
        } catch (const std::bad_alloc&) {
            return -ENOMEM;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "mkernel: the CUDA mover failed: %s\n", error.what());
            return -EIO;
        }
    }
    template <typename Do>
    int locked(Do act) noexcept {
        return guarded([&] {
            const std::lock_guard lock(mutex_);
            return act(*this);
        });
    }

    // Done in the mover's context where there is one: a flush must not wait either.
    void flush_writes(int device) {
        const OwnContext* own = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (lanes_ && lanes_->context().device() == device) own = &lanes_->context();
        }
        const auto flush = [] {
            check(
                driver().flush_gpu_direct_writes(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                                 CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
                "cuFlushGPUDirectRDMAWrites");
        };
        if (own != nullptr) {
            const OwnContext::Scope scope(*own);
            flush();
        } else {
            const OutsideCapture outside;
            const DeviceScope scope(device);
            flush();
        }
    }

    Lanes& lanes() {
        if (!lanes_) lanes_ = std::make_unique<Lanes>(std::max(0, device_of_own()));
        return *lanes_;
    }

    int export_memory(std::uint64_t address, std::uint64_t bytes,
                      transport::ExportedMemory& exported, int& fd) {
        const auto found = find_own(address, bytes);
        // Streams and staging are made now, before kernels run.
        if (!found || found->device != lanes().context().device()) return -EINVAL;
        exported.bytes = found->bytes;
        exported.offset = address - found->address;
        pci_of(found->device).copy(exported.device, sizeof(exported.device) - 1);
        check(driver().mem_export_to_shareable_handle(&fd, found->handle,
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              "cuMemExportToShareableHandle");
        return 0;
    }

    int attach(const transport::ExportedMemory& exported, int fd, std::uint64_t& address) {
        Attached made;
        const int device = lanes().context().device();
        made.memory =
            std::make_unique<DeviceMemory>(DeviceMemory::attach(device, fd, exported.bytes));
        made.same_device = pci_of(device) == exported.device;
        address = made.memory->address() + exported.offset;
        attached_.emplace(made.memory->address(), std::move(made));
        return 0;
    }

    int detach(std::uint64_t address) {
        const auto found = find_attached(address, 1);
        if (found == attached_.end()) return -EINVAL;
        lanes().wait();
        attached_.erase(found);
        return 0;
    }

    std::map<std::uint64_t, Attached>::iterator find_attached(std::uint64_t address,
                                                              std::uint64_t bytes) {
        auto found = attached_.upper_bound(address);
        if (found == attached_.begin()) return attached_.end();
        const DeviceMemory& memory = *(--found)->second.memory;
        const std::uint64_t at = address - memory.address();
        const bool inside = at <= memory.mapped_bytes() && bytes <= memory.mapped_bytes() - at;
        return inside ? found : attached_.end();
    }

    int copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
        const bool into_device = find_own(to, bytes).has_value();
        const auto peer = find_attached(from, bytes);
        const bool own = find_own(from, bytes).has_value();
        const bool from_device = own || peer != attached_.end();
        if (!into_device && !from_device) return -EINVAL;
        const bool staged = !into_device || !from_device || own || peer->second.same_device;
        std::byte* staging = nullptr;
        if (staged) {
            staging = lanes().reserve(bytes);
            if (staging == nullptr) return -EAGAIN;
        }
        const auto through = reinterpret_cast<std::uint64_t>(staging);
        if (!into_device) {
            lanes().add_fetch(reinterpret_cast<std::byte*>(to), from, staging, bytes);
        } else if (!from_device) {
            std::memcpy(staging, reinterpret_cast<const void*>(from), bytes);
            lanes().add({to, 0, through, bytes});
        } else {
            lanes().add({to, from, through, bytes});
        }
        return 0;
    }

    transport::Mover table_;
    std::mutex mutex_;
    std::unique_ptr<Lanes> lanes_;
    std::map<std::uint64_t, Attached> attached_;
};

}  // namespace

transport::Mover* mover() {
    return CudaMover::get().table();
}

GpuDirect gpu_direct(int device) {
    GpuDirect found;
    found.dmabuf = attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, device) != 0;
    found.ordered = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, device) >=
                    CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
    found.flushes = (attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, device) &
                     CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) != 0;
    return found;
}

const transport::DeviceFlush* device_flush(int device) {
    static std::mutex mutex;
    static std::map<int, transport::DeviceFlush> made;  // at addresses that stay
    if (gpu_direct(device).ordered && !CudaMover::get().wants_flushes()) return nullptr;
    const std::lock_guard lock(mutex);
    auto& flush = made[device];
    flush.flush = [](void* self) {
        return CudaMover::get().flush(static_cast<int>(reinterpret_cast<std::intptr_t>(self)));
    };
    flush.self = reinterpret_cast<void*>(static_cast<std::intptr_t>(device));
    return &flush;
}

}  // namespace mkernel::cuda
