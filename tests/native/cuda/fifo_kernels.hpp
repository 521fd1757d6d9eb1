// The grids that check and time the command FIFO on a GPU, and the faults that the checks must catch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/transport/fifo_device.hpp"
#include "backends/transport/republish.hpp"
#include "tests/native/transport/faulty_fifo.hpp"

namespace mkernel::testing {

// How the threads of a grid ended, by transport::WaitResult; in device memory.
struct Ends {
    std::uint32_t of[3];
};

// Every thread pushes `each` numbered commands, or until a push fails.
void push_numbered(transport::FifoDevice fifo, transport::DeviceLimits limits, std::uint32_t blocks,
                   std::uint32_t threads, std::uint32_t each, Fault fault, Ends* ends,
                   cudaStream_t stream);

// `rounds` times: one thread pushes a command that makes the proxy add 1 to `word`, and waits for that. In
// `ticks`, a round trip each, of the device's cycles; `nanoseconds` and `cycles` of all of them.
// Where `run.copies` is not null, another block republishes `word`, and the wait is for the copy.
struct RoundTrips {
    transport::PutCommand command;
    transport::Republished run;  // one word
    std::uint32_t rounds;
    std::uint32_t* ticks;   // pinned
    std::uint64_t* totals;  // pinned: nanoseconds, cycles
    Ends* ends;
};
void round_trips(transport::FifoDevice fifo, transport::DeviceLimits limits,
                 const RoundTrips& trips, cudaStream_t stream);

// How many blocks read the payload, of all rounds; in device memory.
struct Arrivals {
    std::uint32_t read;
};

// `rounds` times: every block but the first waits for the copy of the word to reach the round's number,
// then reads `payload`, which the host wrote before it raised the word; `wrong` counts reads of anything
// older. When all have read, `acknowledged` is the round's number. The first block republishes.
struct Watch {
    transport::Republished run;    // one word
    const std::uint64_t* payload;  // pinned
    std::uint32_t rounds;
    std::uint32_t blocks;
    Arrivals* arrived;            // 0
    std::uint32_t* wrong;         // device memory, 0
    std::uint64_t* acknowledged;  // pinned
    std::uint64_t* started;       // pinned: 1 once the grid runs
    Ends* ends;
};
void watch(transport::DeviceLimits limits, const Watch& what, Fault fault, cudaStream_t stream);

}  // namespace mkernel::testing
