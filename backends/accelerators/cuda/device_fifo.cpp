#include "backends/accelerators/cuda/device_fifo.hpp"

#include <cstddef>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

DeviceFifo::DeviceFifo(std::uint64_t fifo, int device)
    : fifo_(reinterpret_cast<const transport::FifoHandle*>(fifo)) {
    if (fifo_ == nullptr) {
        throw std::invalid_argument(
            "fifo = 0 is no command FIFO: the session takes puts from the host only; use a NIC "
            "whose "
            "session has one");
    }
    if (!fifo_->claim_device()) {
        throw std::invalid_argument(
            "a device pushes to the command FIFO at " + std::to_string(fifo) +
            " already, and it takes one; close that DeviceFifo first, or open another NIC session");
    }
    try {
        open(device);
    } catch (...) {
        fifo_->release_device();
        throw;
    }
}

DeviceFifo::~DeviceFifo() {
    fifo_->release_device();
}

void DeviceFifo::open(int device) {
    const transport::FifoRingMemory& ring = fifo_->device.memory;
    {
        const OutsideCapture outside;
        const DeviceScope scope(device);
        pages_.emplace(reinterpret_cast<std::uint64_t>(ring.pages), ring.bytes);
    }
    const auto fresh = transport::FifoTickets::of(ring);
    tickets_.emplace(DeviceMemory::create(device, sizeof(fresh)));
    tickets_->write_word(offsetof(transport::FifoTickets, free), fresh.free);
    tickets_->write_word(offsetof(transport::FifoTickets, head), fresh.head);
    tickets_->write_word(offsetof(transport::FifoTickets, tail), fresh.tail);
    handle_ = {ring.slots, ring.tail,
               reinterpret_cast<transport::FifoTickets*>(tickets_->address()), ring.capacity};
}

}  // namespace mkernel::cuda
