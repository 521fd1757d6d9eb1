// An accelerator for tests of device memory: memory that only its mover can touch. An address of it is
// one of reserved pages that nobody may read, so whoever touches it without the mover dies of it. Copies
// happen at the last moment: when they are asked after, at the earliest `delay_ns` after they were
// handed over.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "backends/nics/verbs/loader.hpp"
#include "backends/transport/clock.hpp"
#include "backends/transport/mover.hpp"
#include "tests/native/nics/pair.hpp"

namespace mkernel::nics::testing {

class FakeMover {
  public:
    // The one of this process.
    static FakeMover& get() {
        static FakeMover mover;
        return mover;
    }
    // Tells the software device of it, or takes it away.
    static void set(const std::string& library, bool set = true) {
        const verbs::Library opened(library);
        int (*tell)(transport::Mover*) = opened.need("mkernel_softverbs_set_mover", nullptr, "");
        if (tell(set ? &get().table_ : nullptr) != 0) throw std::runtime_error("set_mover");
    }
    static transport::DeviceFlush* flush() { return &get().flush_; }

    // How it behaves.
    std::atomic<std::uint64_t> delay_ns{0};
    std::atomic<std::uint64_t> room{UINT64_MAX};  // bytes of copies that are not done
    std::atomic<int> copy_error{0};
    // What it was asked for.
    std::atomic<std::uint64_t> copies{0}, batches{0}, bytes{0}, flushes{0}, refused{0};
    // Mappings of peers' memory.
    std::size_t attached() {
        const std::lock_guard lock(mutex_);
        return static_cast<std::size_t>(
            std::ranges::count_if(areas_, [](const auto& each) { return !each.second.own; }));
    }

    std::uint64_t allocate(std::size_t bytes) {
        const int fd = ::memfd_create("fake device", MFD_CLOEXEC);
        if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
        return map(fd, bytes, 0, true);
    }
    void free(std::uint64_t address) { unmap(address); }
    // What kernels of the device see.
    std::byte* contents(std::uint64_t address) {
        const std::lock_guard lock(mutex_);
        return find(address, 1);
    }

  private:
    struct Area {
        std::byte* contents;
        std::size_t bytes;
        int fd;  // own memory
        bool own;
    };
    struct Copy {
        std::uint64_t to, from, bytes;
        std::vector<std::byte> payload;  // of a host source
    };
    struct Batch {
        std::uint64_t ticket;
        std::uint64_t due;
        std::vector<Copy> copies;
    };

    FakeMover() {
        table_.self = this;
        table_.owns = [](void* self, std::uint64_t address, std::uint64_t bytes) {
            return of(self).owns(address, bytes) ? 1 : 0;
        };
        table_.export_memory = [](void* self, std::uint64_t address, std::uint64_t bytes,
                                  transport::ExportedMemory* exported, int* fd) {
            return of(self).export_memory(address, bytes, *exported, *fd);
        };
        table_.attach = [](void* self, const transport::ExportedMemory* exported, int fd,
                           std::uint64_t* address) {
            *address = of(self).map(::fcntl(fd, F_DUPFD_CLOEXEC, 0), exported->bytes,
                                    exported->offset, false);
            return 0;
        };
        table_.detach = [](void* self, std::uint64_t address) { of(self).unmap(address); };
        table_.copy = [](void* self, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
            return of(self).copy(to, from, bytes);
        };
        table_.submit = [](void* self, std::uint64_t* ticket) { return of(self).submit(*ticket); };
        table_.done = [](void* self, std::uint64_t ticket) { return of(self).done(ticket); };
        flush_ = {[](void* self) {
                      ++of(self).flushes;
                      if (auto* flushed = of(self).table_.flushed.load()) flushed();
                      return 0;
                  },
                  this};
    }
    static FakeMover& of(void* self) { return *static_cast<FakeMover*>(self); }

    std::uint64_t map(int fd, std::size_t bytes, std::uint64_t offset, bool own) {
        void* contents = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        void* reserved = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (contents == MAP_FAILED || reserved == MAP_FAILED) throw std::bad_alloc();
        const std::lock_guard lock(mutex_);
        const auto address = reinterpret_cast<std::uint64_t>(reserved);
        areas_[address] = {static_cast<std::byte*>(contents), bytes, fd, own};
        return address + offset;
    }
    void unmap(std::uint64_t address) {
        const std::lock_guard lock(mutex_);
        auto area = areas_.upper_bound(address);
        --area;
        ::munmap(area->second.contents, area->second.bytes);
        ::munmap(reinterpret_cast<void*>(area->first), area->second.bytes);
        ::close(area->second.fd);
        areas_.erase(area);
    }
    // With the lock; null: it is no device memory.
    std::byte* find(std::uint64_t address, std::uint64_t bytes) {
        auto area = areas_.upper_bound(address);
        if (area == areas_.begin()) return nullptr;
        --area;
        const std::uint64_t at = address - area->first;
        return at <= area->second.bytes && bytes <= area->second.bytes - at
                   ? area->second.contents + at
                   : nullptr;
    }
    bool owns(std::uint64_t address, std::uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        return find(address, bytes) != nullptr;
    }
    int export_memory(std::uint64_t address, std::uint64_t bytes,
                      transport::ExportedMemory& exported, int& fd) {
        const std::lock_guard lock(mutex_);
        if (find(address, bytes) == nullptr) return -EINVAL;
        const auto area = std::prev(areas_.upper_bound(address));
        exported.bytes = area->second.bytes;
        exported.offset = address - area->first;
        fd = ::fcntl(area->second.fd, F_DUPFD_CLOEXEC, 0);
        return 0;
    }
    int copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
        const std::lock_guard lock(mutex_);
        if (copy_error != 0) return copy_error;
        if (waiting_ != 0 && waiting_ + bytes > room) return ++refused, -EAGAIN;
        Copy made{to, from, bytes, {}};
        const bool host = find(from, bytes) == nullptr;
        if (host && find(to, bytes) == nullptr) return -EINVAL;  // not for a mover
        if (host) {
            const auto* source = reinterpret_cast<const std::byte*>(from);
            made.payload.assign(source, source + bytes);
        }
        waiting_ += bytes;
        filled_.push_back(std::move(made));
        ++copies;
        this->bytes += bytes;
        return 0;
    }
    int submit(std::uint64_t& ticket) {
        const std::lock_guard lock(mutex_);
        ticket = ++last_;
        ++batches;
        batches_.push_back({ticket, transport::monotonic_ns() + delay_ns, std::move(filled_)});
        filled_.clear();
        return 0;
    }
    int done(std::uint64_t ticket) {
        const std::lock_guard lock(mutex_);
        while (!batches_.empty() && batches_.front().ticket <= ticket) {
            if (batches_.front().due > transport::monotonic_ns()) return 0;
            for (const Copy& each : batches_.front().copies) {
                std::byte* to = find(each.to, each.bytes);
                if (to == nullptr) to = reinterpret_cast<std::byte*>(each.to);
                const std::byte* from =
                    each.payload.empty() ? find(each.from, each.bytes) : each.payload.data();
                if (from == nullptr) return -EFAULT;  // it was unmapped meanwhile
                std::memcpy(to, from, each.bytes);
                waiting_ -= each.bytes;
            }
            batches_.pop_front();
        }
        return 1;
    }

    transport::Mover table_;
    transport::DeviceFlush flush_{};
    std::mutex mutex_;
    std::map<std::uint64_t, Area> areas_;
    std::vector<Copy> filled_;
    std::deque<Batch> batches_;
    std::uint64_t waiting_ = 0;  // bytes
    std::uint64_t last_ = 0;
};

// Memory of the device; `flushed`: what arrives in it is flushed.
class DeviceRegion final : public Region {
  public:
    explicit DeviceRegion(std::size_t bytes, bool flushed = false) {
        FakeMover& mover = FakeMover::get();
        const std::uint64_t address = mover.allocate(bytes);
        local_ = {address, bytes, true, ::dup(0), 0, flushed ? FakeMover::flush() : nullptr};
        data_ = mover.contents(address);
    }
    ~DeviceRegion() override {
        FakeMover::get().free(address());
        ::close(local_.dmabuf);
    }
};

}  // namespace mkernel::nics::testing
