#include "backends/transport/fifo.hpp"

#include <sys/eventfd.h>

#include <bit>
#include <cerrno>
#include <system_error>

namespace mkernel::transport {

struct Fifo::Lines {
    alignas(64) std::uint64_t head = 0;
    alignas(64) std::uint64_t tail = 0;
    alignas(64) std::uint32_t waiting = 0;
    alignas(64) std::uint32_t sleeping = 0;
};

void Fifo::FreeLines::operator()(Lines* lines) const {
    delete lines;
}

Fifo::Fifo(std::uint64_t slots) : lines_(new Lines), slots_(new FifoSlot[std::bit_ceil(slots)]()) {
    const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(),
                                "the command FIFO needs an eventfd; raise the limit of open files");
    }
    device_.slots = slots_.get();
    device_.head = &lines_->head;
    device_.tail = &lines_->tail;
    device_.waiting = &lines_->waiting;
    device_.sleeping = &lines_->sleeping;
    device_.capacity = std::bit_ceil(slots);
    device_.wake_fd = fd;
}

Fifo::~Fifo() {
    ::close(device_.wake_fd);
}

bool Fifo::ready() const {
    FifoSlot& slot = slots_[next_ & (device_.capacity - 1)];
    return std::atomic_ref(slot.commit).load(std::memory_order_seq_cst) ==
           FifoDevice::commit_word(next_, device_.capacity);
}

bool Fifo::pop(PutCommand& command) {
    if (!ready()) return false;
    command = slots_[next_ & (device_.capacity - 1)].command;
    ++next_;
    return true;
}

void Fifo::release() {
    const std::atomic_ref<std::uint64_t> tail(lines_->tail);
    if (tail.load(std::memory_order_relaxed) == next_) return;
    tail.store(next_, std::memory_order_seq_cst);
    // A waiter woken for every batch would find a ring that is full again at once: it is worth a
    // system call when a quarter is free. The drainer comes to that by itself; if the NIC holds it
    // up, room is not what producers lack, and their sleeps are bounded.
    if (std::atomic_ref(lines_->waiting).load(std::memory_order_seq_cst) != 0 &&
        4 * (pushed() - next_) <= 3 * device_.capacity) {
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&lines_->tail), FUTEX_WAKE_PRIVATE,
                INT_MAX, nullptr, nullptr, 0);
    }
}

std::uint64_t Fifo::pushed() const {
    return std::atomic_ref(lines_->head).load(std::memory_order_acquire);
}

std::uint64_t Fifo::depth() const {
    const std::uint64_t drained = std::atomic_ref(lines_->tail).load(std::memory_order_acquire);
    const std::uint64_t taken = pushed();
    return taken - drained;
}

void Fifo::prepare_sleep() {
    std::atomic_ref(lines_->sleeping).store(1, std::memory_order_seq_cst);
}

void Fifo::end_sleep() {
    std::atomic_ref(lines_->sleeping).store(0, std::memory_order_relaxed);
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(device_.wake_fd, &count, sizeof(count));
}

}  // namespace mkernel::transport
