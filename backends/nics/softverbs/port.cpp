#include "backends/nics/softverbs/port.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <system_error>
#include <utility>

namespace mkernel::nics::softverbs {
namespace {

[[noreturn]] void raise_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::string fd_path(std::int32_t pid, std::int32_t fd) {
    return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

// The ports of this process, by cookie.
class OwnPorts {
  public:
    void add(std::uint64_t cookie, const std::shared_ptr<Mapping>& map) {
        const std::lock_guard lock(mutex_);
        std::erase_if(ports_, [](const auto& each) { return each.second.expired(); });
        ports_[cookie] = map;
    }
    std::shared_ptr<Mapping> find(std::uint64_t cookie) {
        const std::lock_guard lock(mutex_);
        const auto found = ports_.find(cookie);
        return found != ports_.end() ? found->second.lock() : nullptr;
    }

  private:
    std::mutex mutex_;
    std::unordered_map<std::uint64_t, std::weak_ptr<Mapping>> ports_;
};

OwnPorts& own_ports() {
    static OwnPorts ports;
    return ports;
}

}  // namespace

Fd::~Fd() {
    if (fd_ >= 0) ::close(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Mapping::Mapping(int fd, std::size_t bytes, bool writable) : bytes_(bytes) {
    void* data =
        ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) raise_errno("mmap of " + std::to_string(bytes) + " bytes");
    data_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

LocalPort::LocalPort() : fd_(::memfd_create("mkernel-softverbs", MFD_CLOEXEC)) {
    if (fd_.get() < 0) raise_errno("memfd_create");
    if (::ftruncate(fd_.get(), static_cast<off_t>(kPortBytes)) != 0) raise_errno("ftruncate");
    map_ = std::make_shared<Mapping>(fd_.get(), kPortBytes, true);
    std::random_device random;
    address_.pid = ::getpid();
    address_.fd = fd_.get();
    address_.cookie = (std::uint64_t{random()} << 32) | random();
    auto* header = new (map_->data()) PortHeader{};
    header->magic = kPortMagic;
    header->cookie = address_.cookie;
    header->pid = address_.pid;
    own_ports().add(address_.cookie, map_);
}

void LocalPort::reset_ring(std::uint32_t index) const {
    const auto offset = static_cast<off_t>(kRingsOffset + index * kRingStride);
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                static_cast<off_t>(kRingStride));
}

RemotePort::RemotePort(const PortAddress& address) {
    address_ = address;
    const Fd fd(::open(fd_path(address.pid, address.fd).c_str(), O_RDWR | O_CLOEXEC));
    if (fd.get() < 0) raise_errno("the peer's port cannot be opened");
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) raise_errno("fstat");
    if (!S_ISREG(info.st_mode) || static_cast<std::size_t>(info.st_size) != kPortBytes) {
        errno = EHOSTUNREACH;
        raise_errno("the peer's descriptor is not a port");
    }
    pidfd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, address.pid, 0)));
    if (address.pid == ::getpid()) map_ = own_ports().find(address.cookie);
    if (!map_) map_ = std::make_shared<Mapping>(fd.get(), kPortBytes, true);
    // After pidfd_open: the cookie proves that the process which we now watch still has the port.
    if (header().magic != kPortMagic || header().cookie != address.cookie) {
        errno = EHOSTUNREACH;
        raise_errno("the peer's port is another one than its GID says");
    }
}

bool RemotePort::alive(std::uint64_t now) {
    if (dead_) return false;
    if (now - asked_at_ < 1'000'000) return true;
    asked_at_ = now;
    if (pidfd_.get() >= 0) {
        // Readable once the process has terminated, also while it is a zombie.
        pollfd wait{pidfd_.get(), POLLIN, 0};
        dead_ = ::poll(&wait, 1, 0) > 0;
    } else {
        dead_ = ::kill(address_.pid, 0) != 0 && errno == ESRCH;
    }
    return !dead_;
}

const std::byte* RemotePort::reference(std::int32_t fd, std::uint64_t inode, std::uint64_t offset,
                                       std::uint64_t length) {
    const std::uint64_t dropped = header().dropped_maps.load(std::memory_order_acquire);
    if (dropped != maps_of_) {
        maps_.clear();
        maps_of_ = dropped;
    }
    auto found = maps_.find(inode);
    if (found == maps_.end() || offset + length > found->second.bytes()) {
        const Fd file(::open(fd_path(address_.pid, fd).c_str(), O_RDONLY | O_CLOEXEC));
        struct stat info {};
        if (file.get() < 0 || ::fstat(file.get(), &info) != 0 || info.st_ino != inode ||
            offset + length > static_cast<std::uint64_t>(info.st_size)) {
            return nullptr;
        }
        try {
            Mapping map(file.get(), static_cast<std::size_t>(info.st_size), false);
            found = maps_.insert_or_assign(inode, std::move(map)).first;
        } catch (const std::system_error&) {
            return nullptr;
        }
    }
    return found->second.data() + offset;
}

}  // namespace mkernel::nics::softverbs
