#include "backends/cuda/mover.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cuda/copy_list.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/driver.hpp"
#include "backends/cuda/error.hpp"
#include "backends/cuda/memory.hpp"
#include "backends/cuda/submitter.hpp"

namespace mkernel::cuda {
namespace {

constexpr std::size_t kStaging = 64 << 20;
constexpr std::size_t kAlign = 256;
constexpr std::size_t kStep =
    1 << 20;  // of what is staged: one is read while the one before is written
constexpr std::uint32_t kAskDriver =
    4096;  // questions without an answer between looks for an error
constexpr std::chrono::seconds kLimit{10};  // until copies that do not end are an error

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

// ---- streams and staging of one device

class Lanes {
  public:
    explicit Lanes(int device) : device_(device) {
        const OutsideCapture outside;
        const DeviceScope scope(device);
        int least = 0;
        int greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
        for (cudaStream_t* stream : {&read_, &write_}) {
            check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest),
                  "cudaStreamCreateWithPriority");
        }
        for (cudaEvent_t& event : events_) {
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
        }
        void* pinned = nullptr;
        check(cudaHostAlloc(&pinned, kStaging + kAlign, cudaHostAllocPortable), "cudaHostAlloc");
        staging_ = static_cast<std::byte*>(pinned);
        done_ = reinterpret_cast<std::uint64_t*>(staging_ + kStaging);
        *done_ = 0;
    }

    [[nodiscard]] int device() const { return device_; }

    // Staging for so many bytes until the batch that is being filled is done; null: there is none now.
    std::byte* reserve(std::size_t bytes) {
        const std::size_t whole = (bytes + kAlign - 1) / kAlign * kAlign;
        std::uint64_t at = head_;
        if (at % kStaging + whole > kStaging) at += kStaging - at % kStaging;
        if (at + whole - tail_ > kStaging) return nullptr;
        head_ = at + whole;
        return staging_ + at % kStaging;
    }

    // Copies to the device, in order, and copies from it to host memory, which are there with the batch.
    void add(const QueuedCopy& copy) { writes_.add(copy); }
    void add_fetch(std::byte* to, std::uint64_t from, std::byte* staging, std::size_t bytes) {
        fetches_.push_back({to, staging, bytes});
        writes_.add({0, from, reinterpret_cast<std::uint64_t>(staging), bytes});
    }

    std::uint64_t submit() {
        submitter_.check();
        const std::uint64_t ticket = ++last_;
        submitter_.give({ticket, std::exchange(writes_, {})});
        batches_.push_back({ticket, head_, std::exchange(fetches_, {})});
        return ticket;
    }

    bool done(std::uint64_t ticket) {
        submitter_.check();
        const std::uint64_t ended = std::atomic_ref(*done_).load(std::memory_order_acquire);
        while (!batches_.empty() && batches_.front().ticket <= ended) {
            for (const Fetch& each : batches_.front().fetches) {
                std::memcpy(each.to, each.staging, each.bytes);
            }
            tail_ = batches_.front().staging_end;
            batches_.pop_front();
        }
        if (ended >= ticket) return true;
        if (++asked_ % kAskDriver == 0) {
            const OutsideCapture outside;
            const DeviceScope scope(device_);
            for (cudaStream_t stream : {read_, write_}) {
                const cudaError_t found = cudaStreamQuery(stream);
                if (found != cudaErrorNotReady) check(found, "copies of the mover");
            }
        }
        return false;
    }

    // Nothing that was handed over uses any memory any more. Asks the driver for nothing that waits.
    void wait() {
        const auto until = std::chrono::steady_clock::now() + kLimit;
        while (!done(last_)) {
            if (std::chrono::steady_clock::now() >= until) {
                throw std::runtime_error("batch " + std::to_string(last_) +
                                         " of copies on device " + std::to_string(device_) +
                                         " did not end within " + std::to_string(kLimit.count()) +
                                         " s");
            }
            std::this_thread::yield();
        }
    }

  private:
    struct Fetch {
        std::byte* to;
        std::byte* staging;
        std::size_t bytes;
    };
    struct Batch {
        std::uint64_t ticket;
        std::uint64_t staging_end;
        std::vector<Fetch> fetches;
    };

    struct Submission {
        std::uint64_t ticket = 0;
        CopyList copies;
    };

    // ---- by the submitter's thread

    void hand_over(Submission& batch) {
        const OutsideCapture outside;
        const DeviceScope scope(device_);
        const auto& copies = batch.copies.join();
        for (std::size_t from = 0; from < copies.size();) {
            std::size_t to = from;
            std::size_t staged = 0;
            while (to < copies.size() && staged < kStep) {
                if (copies[to].staging != 0) staged += copies[to].bytes;
                ++to;
            }
            run({copies.data() + from, to - from});
            from = to;
        }
        check(driver().stream_write_value(write_, reinterpret_cast<CUdeviceptr>(done_),
                                          batch.ticket, CU_STREAM_WRITE_VALUE_DEFAULT),
              "cuStreamWriteValue64");
    }

    // Reads what is staged, then writes it, and what goes straight, in order.
    void run(std::span<const QueuedCopy> copies) {
        reads_.clear();
        for (const QueuedCopy& each : copies) {
            if (each.staging != 0 && each.from != 0) {
                reads_.push_back({each.staging, each.from, 0, each.bytes});
            }
        }
        if (!reads_.empty()) {
            queue(reads_, read_);
            cudaEvent_t& event = events_[next_event_++ % events_.size()];
            check(cudaEventRecord(event, read_), "cudaEventRecord");
            check(cudaStreamWaitEvent(write_, event, 0), "cudaStreamWaitEvent");
        }
        reads_.clear();
        for (const QueuedCopy& each : copies) {
            if (each.to == 0) continue;  // a fetch
            reads_.push_back(
                {each.to, each.staging != 0 ? each.staging : each.from, 0, each.bytes});
        }
        queue(reads_, write_);
    }

    // One call for many copies where the driver has it; those of a call have no order.
    void queue(const std::vector<QueuedCopy>& copies, cudaStream_t stream) {
#if CUDA_VERSION >= 13000
        if (copies.size() > 1 && !overlap(copies)) {
            to_.clear();
            from_.clear();
            bytes_.clear();
            for (const QueuedCopy& each : copies) {
                to_.push_back(each.to);
                from_.push_back(each.from);
                bytes_.push_back(each.bytes);
            }
            CUmemcpyAttributes attributes{};
            attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
            attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
            std::size_t first = 0;
            check(driver().memcpy_batch(to_.data(), from_.data(), bytes_.data(), copies.size(),
                                        &attributes, &first, 1, stream),
                  "cuMemcpyBatchAsync");
            return;
        }
#endif
        for (const QueuedCopy& each : copies) {
            check(cudaMemcpyAsync(reinterpret_cast<void*>(each.to),
                                  reinterpret_cast<const void*>(each.from), each.bytes,
                                  cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
        }
    }

    // Of copies in the order of where they go, as they are joined, neighbours tell.
    static bool overlap(const std::vector<QueuedCopy>& copies) {
        const auto both = [](const QueuedCopy& one, const QueuedCopy& other) {
            return one.overlaps(other);
        };
        if (std::ranges::is_sorted(copies, {}, [](const QueuedCopy& each) { return each.to; })) {
            return std::ranges::adjacent_find(copies, both) != copies.end();
        }
        for (std::size_t i = 1; i < copies.size(); ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                if (copies[i].overlaps(copies[j])) return true;
            }
        }
        return false;
    }

    int device_;
    cudaStream_t read_ = nullptr;   // from devices into staging
    cudaStream_t write_ = nullptr;  // into the device
    std::array<cudaEvent_t, 64> events_{};
    std::size_t next_event_ = 0;
    std::byte* staging_ = nullptr;
    std::uint64_t* done_ = nullptr;  // ticket of the last batch that is done; the device writes
    std::uint64_t head_ = 0;         // bytes of staging ever reserved,
    std::uint64_t tail_ = 0;         // and given back
    std::uint64_t last_ = 0;
    std::uint32_t asked_ = 0;
    CopyList writes_;
    std::vector<Fetch> fetches_;
    std::deque<Batch> batches_;
    // The submitter's.
    std::vector<QueuedCopy> reads_;
    std::vector<CUdeviceptr> to_, from_;
    std::vector<std::size_t> bytes_;
    Submitter<Submission> submitter_{[this](Submission& batch) { hand_over(batch); }};
};

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
            if (gpu_direct(device).flushes) {
                const OutsideCapture outside;
                const DeviceScope scope(device);
                check(driver().flush_gpu_direct_writes(
                          CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                          CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
                      "cuFlushGPUDirectRDMAWrites");
            }
            if (auto* flushed = table_.flushed.load(std::memory_order_acquire)) flushed();
            return 0;
        });
    }
    // An emulated NIC asks for flushes.
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

    // Nothing is thrown into the caller, which knows of no CUDA; it reports that its device failed.
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

    Lanes& lanes() {
        if (!lanes_) lanes_ = std::make_unique<Lanes>(std::max(0, device_of_own()));
        return *lanes_;
    }

    int export_memory(std::uint64_t address, std::uint64_t bytes,
                      transport::ExportedMemory& exported, int& fd) {
        const auto found = find_own(address, bytes);
        // Streams and staging are made now, before kernels run.
        if (!found || found->device != lanes().device()) return -EINVAL;
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
        const int device = lanes().device();
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
