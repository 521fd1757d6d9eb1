// Commands that tell whether they are whole and in order, and pushes that are wrong on purpose, so that
// checks of the FIFO can be seen to fail. Host code and CUDA.
#pragma once

#include <cstdint>

#include "backends/transport/fifo_device.hpp"

namespace mkernel::testing {

// What a check's producers do wrong.
enum class Fault : std::uint32_t {
    none = 0,
    commit_before_payload,  // a slot is published, and written once the proxy took it
    ticket_before_room,     // a ticket is taken, then room is waited for, and given up
    tail_not_waited_for,    // a slot is overwritten that was not drained
    abort_not_looked_at,    // a push with the ring full waits for its deadline
    republish_before_word,  // a copy runs ahead of its word
};

MKERNEL_HOST_DEVICE inline std::uint64_t mixed(std::uint64_t producer, std::uint64_t number) {
    return (producer << 32 | number) * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
}

// The command that producer `producer` pushes as its number `number`.
MKERNEL_HOST_DEVICE inline transport::PutCommand numbered(std::uint32_t producer,
                                                          std::uint64_t number) {
    transport::PutCommand command;
    command.local_offset = mixed(producer, number);
    command.remote_offset = ~command.local_offset;
    command.bytes = number;
    command.region = producer;
    command.value = static_cast<std::uint32_t>(command.local_offset >> 32);
    return command;
}

MKERNEL_HOST_DEVICE inline bool late(std::uint64_t start, const transport::DeviceLimits& limits) {
    return transport::near::now_ns() - start > limits.timeout_ns;
}

MKERNEL_HOST_DEVICE inline transport::WaitResult push_wrongly(const transport::FifoDevice& fifo,
                                                              const transport::PutCommand& command,
                                                              const transport::DeviceLimits& limits,
                                                              Fault fault) {
    using transport::WaitResult;
    const std::uint64_t start = transport::near::now_ns();
    const std::uint64_t ticket = transport::near::fetch_add_acq_rel(&fifo.tickets->head, 1);
    transport::FifoSlot& slot = fifo.slots[ticket & (fifo.capacity - 1)];
    const std::uint64_t commit = transport::FifoSlot::commit_word(ticket, fifo.capacity);
    if (fault != Fault::tail_not_waited_for) {
        while (ticket - transport::load_acquire(fifo.tail) >= fifo.capacity) {
            if (late(start, limits)) return WaitResult::timed_out;
            transport::near::pause();
        }
    }
    if (fault == Fault::commit_before_payload) {
        transport::store_release(&slot.commit, commit);
        while (transport::load_acquire(fifo.tail) <= ticket) {
            if (late(start, limits)) return WaitResult::timed_out;
            transport::near::pause();
        }
    }
    slot.write(command);
    if (fault != Fault::commit_before_payload) transport::store_release(&slot.commit, commit);
    return WaitResult::ok;
}

MKERNEL_HOST_DEVICE inline transport::WaitResult push(const transport::FifoDevice& fifo,
                                                      const transport::PutCommand& command,
                                                      const transport::DeviceLimits& limits,
                                                      Fault fault) {
    if (fault == Fault::none) return fifo.push(command, limits);
    if (fault != Fault::abort_not_looked_at) return push_wrongly(fifo, command, limits, fault);
    transport::DeviceLimits blind = limits;
    blind.abort = &fifo.tickets->stopped;  // 0 as long as no push gave up
    return fifo.push(command, blind);
}

}  // namespace mkernel::testing
