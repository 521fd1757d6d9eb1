#include "backends/nics/softverbs/device_memory.hpp"

#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>

namespace mkernel::nics::softverbs {
namespace {

constexpr std::uint64_t kMostBytes = 64 << 20;  // in flight
constexpr std::size_t kMostBatches = 64;
constexpr std::size_t kAhead = 3;                   // batches under way beside which others wait,
constexpr std::uint64_t kWholeBatch = 2 << 20;      // unless they are as large
constexpr std::uint64_t kMostWaiting = 8 << 20;     // of copies that are not due
constexpr std::uint64_t kLimitNs = 10'000'000'000;  // until a copy that does not end is an error

std::atomic<transport::Mover*> registered{nullptr};

// Makes the abstract name of a port's socket; its length counts.
socklen_t name_of(std::uint64_t cookie, sockaddr_un& name) {
    name = {};
    name.sun_family = AF_UNIX;
    const int length =
        std::snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "mkernel-softverbs-%016llx",
                      static_cast<unsigned long long>(cookie));
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                  static_cast<std::size_t>(length));
}

}  // namespace

transport::Mover* mover() {
    return registered.load(std::memory_order_acquire);
}

// ---- copies

std::optional<DeviceCopies::Batch> DeviceCopies::queue(std::uint64_t to, std::uint64_t from,
                                                       std::uint64_t bytes, std::uint64_t due) {
    if (failed_ || bytes_ + filled_ >= kMostBytes || in_flight_.size() >= kMostBatches) {
        return std::nullopt;
    }
    const int error = mover()->copy(mover()->self, to, from, bytes);
    if (error != 0) {
        failed_ = failed_ || error != -EAGAIN;
        return std::nullopt;
    }
    filled_ += bytes;
    due_ = std::min(due_, due);
    return done_ + in_flight_.size() + 1;
}

void DeviceCopies::submit(std::uint64_t now) {
    const bool due = now >= due_ && (in_flight_.size() < kAhead || filled_ >= kWholeBatch);
    if (due || filled_ >= kMostWaiting) hand_over(now);
}

void DeviceCopies::hand_over(std::uint64_t now) {
    if (filled_ == 0 || failed_) return;
    std::uint64_t ticket = 0;
    if (mover()->submit(mover()->self, &ticket) != 0) failed_ = true;
    in_flight_.push_back({ticket, now, filled_});
    bytes_ += filled_;
    filled_ = 0;
    due_ = UINT64_MAX;
}

bool DeviceCopies::poll(std::uint64_t now) {
    bool ended = false;
    while (!in_flight_.empty() && !failed_) {
        const InFlight& first = in_flight_.front();
        const int done = mover()->done(mover()->self, first.ticket);
        if (done < 0) failed_ = true;  // the mover said why
        if (done == 0 && now > first.since + kLimitNs) {
            failed_ = true;
            std::fprintf(stderr, "softverbs: copies of %llu bytes did not end within %llu s\n",
                         static_cast<unsigned long long>(first.bytes), kLimitNs / 1'000'000'000ULL);
        }
        if (done <= 0) break;
        bytes_ -= first.bytes;
        in_flight_.pop_front();
        ++done_;
        ended = true;
    }
    return ended;
}

bool DeviceCopies::drain() {
    hand_over(now_ns());
    while (!in_flight_.empty() && !failed_) {
        if (!poll(now_ns())) sched_yield();
    }
    return !failed_;
}

bool DeviceCopies::copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
    if (!queue(to, from, bytes) && (!drain() || !queue(to, from, bytes))) return false;
    return drain();
}

// ---- offers

Offers::Offers(const PortAddress& own)
    : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_un name{};
    const socklen_t length = name_of(own.cookie, name);
    const int on = 1;
    if (socket_.get() < 0 ||
        ::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
        ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
        throw std::system_error(errno, std::generic_category(), "socket for device memory");
    }
}

bool Offers::send(std::uint64_t cookie, const Message& message, int fd) const {
    sockaddr_un name{};
    Message copy = message;
    iovec data{&copy, sizeof(copy)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_name = &name;
    header.msg_namelen = name_of(cookie, name);
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    if (fd >= 0) {
        header.msg_control = control;
        header.msg_controllen = sizeof(control);
        cmsghdr* rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
    }
    // A peer that is gone needs nothing more.
    return ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) >= 0 ||
           (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS && errno != EINTR);
}

void Offers::receive(DeviceCopies& copies) {
    while (true) {
        Message message;
        iovec data{&message, sizeof(message)};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(ucred))] = {};
        msghdr header{};
        header.msg_iov = &data;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof(control);
        const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
        if (got < 0) return;
        Fd fd;
        uid_t user = static_cast<uid_t>(-1);
        for (cmsghdr* each = CMSG_FIRSTHDR(&header); each != nullptr;
             each = CMSG_NXTHDR(&header, each)) {
            if (each->cmsg_level != SOL_SOCKET) continue;
            if (each->cmsg_type == SCM_RIGHTS) {
                int found = -1;
                std::memcpy(&found, CMSG_DATA(each), sizeof(found));
                fd = Fd(found);
            } else if (each->cmsg_type == SCM_CREDENTIALS) {
                ucred who{};
                std::memcpy(&who, CMSG_DATA(each), sizeof(who));
                user = who.uid;
            }
        }
        if (got == sizeof(message) && message.magic == Message::kMagic && user == ::geteuid()) {
            take(message, fd, copies);
        }
    }
}

void Offers::take(const Message& m, const Fd& fd, DeviceCopies& copies) {
    const auto found = attached_.find({m.from, m.token});
    if (m.length == 0) {
        if (found == attached_.end()) return;
        copies.drain();
        mover()->detach(mover()->self, found->second.address);
        attached_.erase(found);
        return;
    }
    // Without a mover, or where the memory cannot be mapped, later reads of it fail.
    if (found != attached_.end() || mover() == nullptr || fd.get() < 0) return;
    Attached made{0, m.length};
    if (mover()->attach(mover()->self, &m.memory, fd.get(), &made.address) == 0) {
        attached_.emplace(Key{m.from, m.token}, made);
    }
}

std::uint64_t Offers::find(std::uint64_t cookie, std::uint64_t token, std::uint64_t offset,
                           std::uint64_t length) const {
    const auto found = attached_.find({cookie, token});
    if (found == attached_.end() || offset > found->second.length ||
        length > found->second.length - offset) {
        return 0;
    }
    return found->second.address + offset;
}

void Offers::forget(std::uint64_t cookie, DeviceCopies& copies) {
    std::erase_if(attached_, [&](const auto& each) {
        if (each.first.first != cookie) return false;
        copies.drain();
        mover()->detach(mover()->self, each.second.address);
        return true;
    });
}

void Offers::forget_all(DeviceCopies& copies) {
    while (!attached_.empty()) forget(attached_.begin()->first.first, copies);
}

}  // namespace mkernel::nics::softverbs

// Sets the accelerator's mover, for all devices of this process; it stays valid until the process ends.
// Returns 0, or EINVAL.
extern "C" __attribute__((visibility("default"))) int mkernel_softverbs_set_mover(
    mkernel::transport::Mover* mover) {
    if (mover != nullptr && mover->version != mkernel::transport::Mover::kVersion) return EINVAL;
    mkernel::nics::softverbs::registered.store(mover, std::memory_order_release);
    return 0;
}
