// The proxy thread: drains the command FIFO into the NIC and turns arrivals into signals.
//
// It spins for kSpins empty rounds, then sleeps in ppoll on the FIFO's eventfd and the NIC's
// completion and event descriptors, so an idle rank costs no CPU and every source wakes it at once.
// The sleep is bounded by kMaxSleepMs, for the abort word.
//
// A device that pushes cannot wake it. Where one has claimed its ring, the proxy spins for kAwakeNs after
// the last command or arrival, and then sleeps in *naps*: a ppoll of kNapNs each, between which it looks
// at that ring only, and every kMaxSleepMs at everything. A nap costs little more than its two changes of
// context and its timer, which is 2 to 4 us of a core, and 25 us on some virtual machines: naps are made
// as long as keeps them, with all those looks, at kNapShare of a core, and kMaxNapNs at most. A host that
// queues work that will push announces it (FifoHandle::await_device): then the proxy does not nap before the
// first command of it, for kAwaitedNs at most. Replayed graphs announce nothing.
//
// A peer whose queue is full does not hold up the others: its commands are set aside, in their order,
// and tried again. There is room for as many as the FIFO has slots; when that is used up, commands
// stay in the FIFO.
//
// Completions (transport/put_command.hpp) are taken in order. Each waits until the commands before it have
// been posted, marks what the NIC has then, and is raised once that is complete. Puts that were posted
// meanwhile for other peers are waited for too.
//
// After a failure of the NIC or an abort of the world it posts nothing more; a NIC failure also
// sets the abort word of the pad (AbortCode::nic_error), which wakes every waiter there.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "backends/nics/completions.hpp"
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
    static constexpr std::uint64_t kAwakeNs = 500'000;
    static constexpr std::uint64_t kAwaitedNs = 20'000'000;
    static constexpr std::uint64_t kNapNs = 75'000;
    static constexpr std::uint64_t kMaxNapNs = 2'000'000;
    static constexpr double kNapShare = 0.04;

    // Starts the thread, pinned to `cpus` unless empty. `nic` and `fifo` outlive the proxy.
    Proxy(Nic& nic, transport::Fifo& fifo, transport::SignalPad pad, const std::vector<int>& cpus);
    ~Proxy();
    Proxy(const Proxy&) = delete;
    Proxy& operator=(const Proxy&) = delete;

    // Returns true once every command pushed before is complete locally (a completion: raised); a device's
    // command counts once its push has ended. Returns false at the deadline (monotonic_ns) or once the NIC
    // failed or the world aborted. Any thread, several at once.
    bool flush(std::uint64_t deadline_ns);

    [[nodiscard]] ProxyStatistics statistics() const;

    // Joins the thread; drains nothing. Calling it twice is harmless.
    void stop();

  private:
    void run();
    bool post();
    bool post(transport::FifoRing& ring, std::uint64_t goal);
    PutResult put(const transport::PutCommand& command, PutCursor& cursor);
    bool retry();
    [[nodiscard]] bool has_room() const { return !waiting_.full() && !completions_.full(); }
    void mark_completions();
    void progress_completions();
    void begin_flush();
    bool flush_begun() const;
    bool flush_due();
    void progress_flush();
    bool lingers();
    bool awaits(std::uint64_t now);
    void sleep();
    void nap(std::span<pollfd> descriptors, int most_ms);
    bool halted();
    bool raise(std::uint32_t peer, std::uint32_t signal, std::uint64_t value) override;

    static constexpr std::uint32_t kFlushMark = 0;  // the others are the completions'

    Nic& nic_;
    transport::Fifo& fifo_;
    transport::SignalPad pad_;
    std::atomic<bool> stop_{false};

    // Used by the proxy thread only.
    Waiting waiting_;
    Completions completions_;
    bool reported_ = false;            // the failure went to the pad
    std::uint64_t taken_ = 0;          // commands
    std::uint64_t idle_since_ns_ = 0;  // 0: not idle
    std::uint64_t awaited_ = 0;        // of the FIFO, as last seen,
    std::uint64_t awaited_since_ = 0;  // and when; 0: nothing is awaited
    std::uint64_t awaited_after_ = 0;  // commands of the device before
    std::uint64_t nap_ns_ = kNapNs;
    std::uint64_t naps_ = 0;           // since their cost was last looked at,
    std::uint64_t naps_cpu_ns_ = 0;    // with the looks between them
    std::uint64_t napped_cpu_ns_ = 0;  // at the last one's end; 0: not just looks since

    // Flushes are numbered. The proxy serves one at a time, and with it all that were requested before it
    // began: it covers the commands that were in the rings then.
    struct Flush {
        std::uint64_t number = 0;
        std::uint64_t host = 0;      // tickets before this one,
        std::uint64_t device = 0;    // in either ring,
        std::uint64_t commands = 0;  // which are among so many that were taken, so far
        bool marked = false;
    };
    Flush flush_;
    // A word with a futex on its low half, as the FIFO's tail.
    alignas(64) std::atomic<std::uint64_t> flush_wanted_{0};
    alignas(64) std::uint64_t flushed_ = 0;

    std::atomic<std::uint64_t> puts_{0}, put_bytes_{0}, signals_sent_{0}, signals_raised_{0};
    std::atomic<std::uint64_t> stalls_{0}, set_aside_{0};

    std::thread thread_;
};

}  // namespace mkernel::nics
