// Calls of a world run one after another on each device, whatever streams they are queued on: two
// persistent kernels that wait for their peers must never stand in opposite order on two ranks.
//
// `begin(stream)`, the call's work, `end(stream)`. While a stream is being captured into a graph, calls
// are ordered among those of that capture; how a graph's replays and other calls follow one another
// is for the user to order, by streams. One thread at a time. Streams are plain integers.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "backends/transport/fifo_host.hpp"

namespace mkernel::hopper {

class CallOrder {
  public:
    explicit CallOrder(int device);
    CallOrder(const CallOrder&) = delete;
    CallOrder& operator=(const CallOrder&) = delete;
    ~CallOrder();

    // Whoever carries what calls put to other nodes is told of each; null: nobody. It outlives this, or its
    // place here.
    void announce_to(const transport::FifoHandle* fifo) { fifo_ = fifo; }

    // What is queued on `stream` from here on comes after the previous call.
    void begin(std::uint64_t stream);

    // A second stream of the call, for copy engines: after all that is queued on `stream`.
    std::uint64_t fork(std::uint64_t stream);
    // `stream` goes on only after what was queued on the second one.
    void join(std::uint64_t stream);

    // A third one, for kernels, whose blocks go before those of `stream`: likewise.
    std::uint64_t fork_kernels(std::uint64_t stream);
    void join_kernels(std::uint64_t stream);

    // The call's number, for `finished`; 0 while capturing: nothing runs that could end.
    std::uint64_t end(std::uint64_t stream);

    // The number of the last call that was not captured; 0: none.
    [[nodiscard]] std::uint64_t latest() const { return calls_; }

    // Whether a graph holds a call of the world: it may be replayed unheard.
    [[nodiscard]] bool captured() const { return capture_ != 0; }

    // Whether that call's work is over. CudaError where the device has failed.
    [[nodiscard]] bool finished(std::uint64_t call) const;

  private:
    // Old calls share the event of a later one: it ends no earlier than they do.
    static constexpr std::uint64_t kEvents = 64;

    cudaEvent_t& event_of(std::uint64_t call) { return events_[call % kEvents]; }

    // `other`, which from here on comes after what is queued on `stream`; and the other way round.
    [[nodiscard]] std::uint64_t forked(std::uint64_t stream, cudaStream_t other) const;
    void joined(std::uint64_t stream, cudaStream_t other) const;

    const transport::FifoHandle* fifo_ = nullptr;
    cudaStream_t side_ = nullptr;
    cudaStream_t kernels_ = nullptr;
    cudaEvent_t forked_ = nullptr, joined_ = nullptr, captured_ = nullptr;
    std::array<cudaEvent_t, kEvents> events_{};
    std::uint64_t calls_ = 0;
    std::uint64_t last_stream_ = 0;     // of call number `calls_`
    unsigned long long capturing_ = 0;  // that the call under way is part of; 0: none
    unsigned long long capture_ = 0;    // that `captured_` belongs to; 0: none
};

}  // namespace mkernel::hopper
