// How native code of a backend uses mkernel's headers: a kernel that sends a chunk to a rank of another
// node, then waits until that rank's own chunk has arrived. Build it with
//     g++ -std=c++20 -shared -fPIC -I"$(mkernel --include-dir)" fifo_kernel.cpp -o fifo_kernel.so
// and call it through ctypes with what the contract hands a launch: the addresses of the rank's FIFO
// handle (`call.fifo`) and of its signal pad (`call.pad`).
#include "backends/transport/fifo_host.hpp"
#include "backends/transport/signal_pad.hpp"

using namespace mkernel;

// Returns 0, or why a wait ended early (transport::WaitResult).
extern "C" int exchange(const transport::FifoHandle* fifo, void* pad_memory, std::uint32_t peer,
                        std::uint64_t bytes, std::uint32_t signal, std::uint64_t wanted,
                        std::uint64_t timeout_ns) {
    const transport::SignalPad pad(pad_memory);
    const std::uint64_t deadline = transport::monotonic_ns() + timeout_ns;
    transport::Diagnosis who;
    who.waiter = transport::Waiter::comm_kernel;
    who.peer = peer;

    transport::PutCommand put;
    put.peer = peer;
    put.bytes = bytes;
    put.signal = signal;
    put.value = 1;
    const transport::WaitResult queued = fifo->push(put, pad, deadline, who);
    if (queued != transport::WaitResult::ok) return static_cast<int>(queued);
    return static_cast<int>(pad.wait(signal, wanted, deadline, who));
}
