// The order of a world's calls: they run one after another on each device, whatever streams they are queued
// on, since two persistent kernels that wait for their peers must never stand in opposite order on two ranks.
//
// A call is `begin(stream)`, the call's work, `end(stream)`. While a stream is being captured into a graph,
// calls are ordered among those of that capture; the user orders a graph's replays and other calls, by
// streams. One thread at a time uses it. Streams are plain integers.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "backends/transport/fifo_host.hpp"

namespace mkernel::cuda {

// Returns CUDA's number of the capture that `stream` is part of; 0: there is none.
unsigned long long capture_of(std::uint64_t stream);

class CallOrder {
  public:
    explicit CallOrder(int device);
    CallOrder(const CallOrder&) = delete;
    CallOrder& operator=(const CallOrder&) = delete;
    ~CallOrder();

    // Announces each call to the carrier of what calls put to other nodes; null: to nobody. The carrier
    // must live until this object is destroyed or announces to another one.
    void announce_to(const transport::FifoHandle* fifo) { fifo_ = fifo; }

    // Orders everything queued on `stream` from here on after the previous call.
    void begin(std::uint64_t stream);

    // Returns a second stream of the call, for copy engines, which comes after everything queued on `stream`.
    std::uint64_t fork(std::uint64_t stream);
    // Makes `stream` go on only after everything queued on the second one.
    void join(std::uint64_t stream);

    // Do the same with a third stream, for kernels, whose blocks go before those of `stream`.
    std::uint64_t fork_kernels(std::uint64_t stream);
    void join_kernels(std::uint64_t stream);

    // Ends a call and returns its number, for `finished`; 0 while capturing, when nothing runs that could
    // end.
    std::uint64_t end(std::uint64_t stream);

    // Returns the number of the last call that was not captured; 0 for none.
    [[nodiscard]] std::uint64_t latest() const { return calls_; }

    // Returns true where a graph holds a call of the world: it may be replayed without this object being
    // called.
    [[nodiscard]] bool captured() const { return capture_ != 0; }

    // Returns true when that call's work is over. CudaError where the device has failed.
    [[nodiscard]] bool finished(std::uint64_t call) const;

  private:
    // Old calls share the event of a later one: it ends no earlier than they do.
    static constexpr std::uint64_t kEvents = 64;

    cudaEvent_t& event_of(std::uint64_t call) { return events_[call % kEvents]; }

    // `forked` returns `other`, which from here on comes after everything queued on `stream`; `joined` orders
    // them the other way round.
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

}  // namespace mkernel::cuda
