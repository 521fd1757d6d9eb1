#include "backends/transport/fifo.hpp"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <string>
#include <system_error>

namespace mkernel::transport {

namespace {

// The part of a ring before its slots.
struct RingHeader {
    alignas(64) std::uint64_t tail;
    alignas(64) std::uint32_t flag;
};

std::uint64_t ring_bytes(std::uint64_t capacity) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    return (sizeof(RingHeader) + capacity * sizeof(FifoSlot) + page - 1) / page * page;
}

}  // namespace

FifoRing::FifoRing(std::uint64_t slots) {
    memory_.capacity = std::bit_ceil(slots);
    memory_.bytes = ring_bytes(memory_.capacity);
    // Shared, so that a fork does not copy pages that a device writes to.
    memory_.pages =
        ::mmap(nullptr, memory_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory_.pages == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(),
                                "the command FIFO needs " + std::to_string(memory_.bytes) +
                                    " bytes; lower MKERNEL_NIC_SETTINGS__FIFO_SLOTS");
    }
    auto* header = static_cast<RingHeader*>(memory_.pages);
    memory_.tail = &header->tail;
    memory_.slots = reinterpret_cast<FifoSlot*>(header + 1);
}

FifoRing::~FifoRing() {
    ::munmap(memory_.pages, memory_.bytes);
}

std::uint32_t* FifoRing::flag() const {
    return &static_cast<RingHeader*>(memory_.pages)->flag;
}

bool FifoRing::release() {
    const auto tail = shared(*memory_.tail);
    if (tail.load(std::memory_order_relaxed) == next_) return false;
    tail.store(next_, std::memory_order_seq_cst);
    return true;
}

struct Fifo::Lines {
    alignas(64) std::uint64_t head = 0;
    alignas(64) std::uint32_t waiting = 0;
    alignas(64) std::uint32_t sleeping = 0;
    alignas(64) std::uint64_t awaited = 0;
};

void Fifo::FreeLines::operator()(Lines* lines) const {
    delete lines;
}

Fifo::Fifo(std::uint64_t slots) : host_(slots), device_(slots), lines_(new Lines) {
    const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0) {
        throw std::system_error(errno, std::generic_category(),
                                "the command FIFO needs an eventfd; raise the limit of open files");
    }
    handle_.slots = host_.memory().slots;
    handle_.head = &lines_->head;
    handle_.tail = host_.memory().tail;
    handle_.waiting = &lines_->waiting;
    handle_.sleeping = &lines_->sleeping;
    handle_.capacity = host_.memory().capacity;
    handle_.wake_fd = fd;
    handle_.device = {device_.memory(), device_.flag(), &lines_->awaited};
}

Fifo::~Fifo() {
    ::close(handle_.wake_fd);
}

void Fifo::release() {
    device_.release();
    if (!host_.release()) return;
    // A waiter woken for every batch would find a ring that is full again at once: a wake is worth its system
    // call when a quarter is free. The drainer gets there by itself; if the NIC holds it up, producers do not
    // lack room, and their sleeps are bounded.
    if (shared(lines_->waiting).load(std::memory_order_seq_cst) != 0 &&
        4 * (pushed() - host_.popped()) <= 3 * handle_.capacity) {
        wake_all(low_half(handle_.tail), Reach::process);
    }
}

std::uint64_t Fifo::pushed() const {
    return shared(lines_->head).load(std::memory_order_acquire);
}

std::uint64_t Fifo::depth() const {
    const auto tail = [](const FifoRing& ring) {
        return shared(*ring.memory().tail).load(std::memory_order_acquire);
    };
    // Tails move on meanwhile, so they are read first.
    const std::uint64_t drained = tail(host_) + tail(device_);
    return pushed() + device_.published() - drained;
}

bool Fifo::device_claimed() const {
    return shared(*handle_.device.claimed).load(std::memory_order_seq_cst) != 0;
}

std::uint64_t Fifo::awaited() const {
    return shared(lines_->awaited).load(std::memory_order_seq_cst);
}

void Fifo::prepare_sleep() {
    shared(lines_->sleeping).store(1, std::memory_order_seq_cst);
}

void Fifo::end_sleep() {
    shared(lines_->sleeping).store(0, std::memory_order_relaxed);
    hush(handle_.wake_fd);
}

}  // namespace mkernel::transport
