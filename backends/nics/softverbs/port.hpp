// The two ends of a port's shared memory: LocalPort owns it, RemotePort maps a peer's.
//
// Nothing lies in the file system: the memory is an anonymous memfd that lives as long as a process
// holds it, and a peer opens it through /proc/<pid>/fd. Both ends need the same user.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "backends/nics/softverbs/flow.hpp"
#include "backends/nics/softverbs/wire.hpp"

namespace mkernel::nics::softverbs {

// A file descriptor that closes itself.
class Fd {
  public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    ~Fd();
    Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Fd& operator=(Fd&& other) noexcept;
    [[nodiscard]] int get() const { return fd_; }

  private:
    int fd_;
};

// A mapping that unmaps itself.
class Mapping {
  public:
    Mapping() = default;
    // Throws std::system_error.
    Mapping(int fd, std::size_t bytes, bool writable);
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// The contents of a port's memory.
class Port {
  public:
    [[nodiscard]] PortHeader& header() const {
        return *reinterpret_cast<PortHeader*>(map_->data());
    }
    [[nodiscard]] Ring& ring(std::uint32_t index) const {
        return *reinterpret_cast<Ring*>(map_->data() + kRingsOffset + index * kRingStride);
    }
    [[nodiscard]] Flow& flow(std::uint32_t index) const {
        return *reinterpret_cast<Flow*>(map_->data() + kFlowsOffset + index * kFlowStride);
    }

  protected:
    std::shared_ptr<Mapping> map_;
    PortAddress address_;
};

class LocalPort : public Port {
  public:
    // Throws std::system_error.
    LocalPort();

    [[nodiscard]] PortAddress address() const { return address_; }
    // Gives a ring's memory back and zeroes it.
    void reset_ring(std::uint32_t index) const;

  private:
    Fd fd_;
};

// A peer's port. Used by one engine only. A port of this very process is not mapped a second time:
// one address for one word is what lets a race detector follow the two ends.
class RemotePort : public Port {
  public:
    // Throws std::system_error: ENOENT-like where the process or port is gone.
    explicit RemotePort(const PortAddress& address);

    [[nodiscard]] std::uint64_t cookie() const { return address_.cookie; }

    // Returns true while its process runs. Queries the kernel at most once a millisecond; dead stays dead.
    bool alive(std::uint64_t now);

    // Returns `length` bytes at `offset` of the file that is `fd` there and has this inode; null where it
    // cannot be mapped. Valid until the owner deregisters the memory.
    const std::byte* reference(std::int32_t fd, std::uint64_t inode, std::uint64_t offset,
                               std::uint64_t length);

  private:
    Fd pidfd_;
    bool dead_ = false;
    std::uint64_t asked_at_ = 0;
    std::uint64_t maps_of_ = 0;  // header().dropped_maps when `maps_` was last valid
    std::unordered_map<std::uint64_t, Mapping> maps_;  // by inode
};

}  // namespace mkernel::nics::softverbs
