// The proxy thread: drains the command FIFO into the NIC and turns arrivals into signals.
//
// It spins for kSpins empty rounds, then sleeps in ppoll on the FIFO's eventfd and the NIC's
// completion and event descriptors, so an idle rank costs no CPU and every source wakes it at once.
// The sleep is bounded by kMaxSleepMs, for producers that cannot ring and for the abort word.
//
// A peer whose queue is full does not hold up the others: its commands are set aside, in their order,
// and tried again. There is room for as many as the FIFO has slots; when that is used up, commands
// stay in the FIFO.
//
// After a failure of the NIC or an abort of the world it posts nothing more; a NIC failure also
// sets the abort word of the pad (AbortCode::nic_error), which wakes whoever waits there.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "backends/nics/nic.hpp"
#include "backends/nics/waiting.hpp"
#include "backends/transport/fifo.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::nics {

struct ProxyStatistics {
    std::uint64_t puts = 0;            // commands handed to the NIC
    std::uint64_t put_bytes = 0;       // their payload
    std::uint64_t signals_sent = 0;    // commands that carried a signal
    std::uint64_t signals_raised = 0;  // arrivals added to the pad
    std::uint64_t queue_depth = 0;     // commands not yet handed to the NIC
    std::uint64_t stalls = 0;          // commands set aside because their peer's queue was full
};

class Proxy final : private SignalSink {
  public:
    static constexpr int kBatch = 32;
    static constexpr int kSpins = 200;
    static constexpr int kMaxSleepMs = 20;
    static constexpr int kWaitingSleepMs = 1;  // while commands wait: credits come without an event

    // Starts the thread, pinned to `cpus` unless empty. `nic` and `fifo` outlive the proxy.
    Proxy(Nic& nic, transport::Fifo& fifo, transport::SignalPad pad, const std::vector<int>& cpus);
    ~Proxy();
    Proxy(const Proxy&) = delete;
    Proxy& operator=(const Proxy&) = delete;

    // True once every command pushed before is complete locally; false at the deadline
    // (monotonic_ns) or once the NIC failed or the world aborted. Any thread, several at once.
    bool flush(std::uint64_t deadline_ns);

    [[nodiscard]] ProxyStatistics statistics() const;

    // Drains nothing; joins the thread. Twice is harmless.
    void stop();

  private:
    void run();
    bool post();
    PutResult put(const transport::PutCommand& command, PutCursor& cursor);
    bool retry();
    bool flush_due();
    void progress_flush();
    void sleep();
    bool halted();
    bool raise(std::uint32_t peer, std::uint32_t signal, std::uint64_t value) override;

    Nic& nic_;
    transport::Fifo& fifo_;
    transport::SignalPad pad_;
    std::atomic<bool> stop_{false};

    // Proxy thread only.
    Waiting waiting_;
    bool reported_ = false;  // the failure went to the pad
    bool marked_ = false;
    std::uint64_t marked_at_ = 0;

    // Tickets. flushed_ is a futex through its low half, as the FIFO's tail.
    alignas(64) std::atomic<std::uint64_t> flush_wanted_{0};
    alignas(64) std::uint64_t flushed_ = 0;

    std::atomic<std::uint64_t> puts_{0}, put_bytes_{0}, signals_sent_{0}, signals_raised_{0};
    std::atomic<std::uint64_t> stalls_{0}, set_aside_{0};

    std::thread thread_;
};

}  // namespace mkernel::nics
