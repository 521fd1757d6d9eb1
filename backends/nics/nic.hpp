// The NIC contract: the interface of a NIC backend to the proxy and the session.
//
// Threads. Set-up calls (add_peer, connect, register_memory, bind, withdraw, deregister_memory,
// inject_failure, close) come from one thread at a time, the session's; add_peer and connect end
// before the proxy starts, close comes after it has stopped, those on memory may run beside it. The
// data path (put, ring, poll, mark, reached_mark, arm, settle) belongs to the proxy thread alone.
// capabilities(), registrations() and failure() may be called by any thread, lanes() by any once the
// peers are added.
//
// The data path neither allocates nor locks, except once, when it records the first failure.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/transport/mover.hpp"
#include "backends/transport/put_command.hpp"

namespace mkernel::nics {

// The error of a failed bring-up; the message names the call, the value and what to do.
class SetupError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The first error of a NIC. `status` is spelt as verbs spells it without its prefix: a completion
// status (REM_ACCESS_ERR), an asynchronous event (DEVICE_FATAL), or one of ours: INVALID_PUT (a
// command that names no bound memory, or a signal or value outside its range), POST_FAILED.
struct Failure {
    std::string status;
    std::uint32_t qp = 0;
    std::uint64_t wr_id = 0;
    std::uint32_t vendor_err = 0;
    std::int64_t peer = -1;  // rank; -1: not known
    std::string message;
};

struct Capabilities {
    bool ordered = false;  // puts to one peer become visible in the order they were made
    bool dmabuf = false;
    bool peermem = false;          // the kernel's module is loaded
    std::uint32_t max_signal = 0;  // largest signal index a put may name
    std::uint32_t max_value = 0;   // largest value one put may add
};

// Memory of this process that is to be registered.
struct LocalMemory {
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    bool device = false;  // an accelerator's: a NIC reaches it through a dmabuf or peermem only
    int dmabuf = -1;      // descriptor of a dmabuf that holds it, or -1. It stays the caller's, who
                          // may close it once the memory is registered
    std::uint64_t dmabuf_offset = 0;  // of `address` in the dmabuf, which begins at its granularity
    // The flush of a device whose kernels see a NIC's writes only after it; null: they see them at once. It
    // stays valid until the NIC is closed.
    const transport::DeviceFlush* flush = nullptr;
};

// The number of registrations by way; the ladder is in verbs/registration.hpp.
struct Registrations {
    std::uint64_t host = 0;
    std::uint64_t dmabuf = 0;
    std::uint64_t peermem = 0;
};

// The key by which a peer reaches memory registered here. One a rail.
struct RemoteKey {
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::vector<std::uint32_t> rkeys;
};

// The endpoint by which a peer connects to one of the queue pairs made for it.
struct Endpoint {
    std::uint32_t qp_num = 0;
    std::uint32_t psn = 0;  // RC: first packet number; SRD: the queue key
    std::uint32_t lid = 0;
    std::uint32_t mtu = 0;  // bytes
    std::string gid;        // 32 hexadecimal digits
    bool ethernet = false;
    std::uint32_t rail = 0;            // the owner's, whose keys open its memory here
    std::uint32_t receives = 0;        // immediates that may be on their way to this end
    std::uint64_t credit_address = 0;  // where this end learns how many the other has taken
    std::uint32_t credit_rkey = 0;
};

// The puts that one lane, a queue pair to a peer, has been given so far.
struct LaneCounts {
    std::uint32_t peer = 0;
    std::uint32_t lane = 0;  // of the peer's
    std::uint32_t rail = 0;  // our port, by its place among those opened
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
};

// The limit of region numbers, so that their tables never move while the proxy reads them.
inline constexpr std::uint32_t kMaxRegions = 1024;
// The number of marks that can be in use at once.
inline constexpr std::uint32_t kMarks = 16;
// The most descriptors that are slept on.
inline constexpr std::size_t kMaxDescriptors = 16;

// The progress of a put; fresh before the first call of Nic::put for a command. The fields are the NIC's own.
struct PutCursor {
    bool begun = false;          // the command was checked, and a way chosen
    bool spread = false;         // over all lanes; else over one
    bool grouped = false;        // its messages are counted at the receiver
    std::uint32_t group = 0;     // their group's number
    std::uint32_t lane = 0;      // whose share is being handed over
    std::uint64_t bytes = 0;     // of that share, handed over
    std::uint32_t messages = 0;  // of that share, handed over
};

enum class PutResult {
    done,    // all of it is staged; ring() makes the NIC see it
    busy,    // queue full: poll, then call again with the same cursor
    failed,  // failure() says why
};

// The receiver of arrived signals. Called by poll() on the proxy thread, once a put's bytes are all visible,
// to running kernels too where they are in a device's memory.
class SignalSink {
  public:
    // Raises a signal. Returns false where there is no such signal here; the NIC then fails with INVALID_PUT.
    virtual bool raise(std::uint32_t peer, std::uint32_t signal, std::uint64_t value) = 0;

  protected:
    ~SignalSink() = default;
};

class Nic {
  public:
    Nic() = default;
    virtual ~Nic() = default;
    Nic(const Nic&) = delete;
    Nic& operator=(const Nic&) = delete;

    [[nodiscard]] virtual Capabilities capabilities() const = 0;

    // Makes a lane, a queue pair that `peer` will connect to, on each of these rails, which may come several
    // times; `connect` then connects them, one by one, to those that the peer made for us. SetupError.
    virtual std::vector<Endpoint> add_peer(std::uint32_t peer,
                                           std::span<const std::uint32_t> rails) = 0;
    virtual void connect(std::uint32_t peer, const std::vector<Endpoint>& remote) = 0;

    virtual RemoteKey register_memory(std::uint32_t region, const LocalMemory& memory) = 0;
    virtual void bind(std::uint32_t region, std::uint32_t peer, const RemoteKey& key) = 0;
    // Withdraw a region and everything that is bound of it: after withdraw() puts of it are refused; once
    // earlier puts are complete, deregister_memory() deregisters it, and its number may be used again. Both
    // are harmless for a region that is not there.
    virtual void withdraw(std::uint32_t region) = 0;
    virtual void deregister_memory(std::uint32_t region) = 0;
    // Returns how many regions are registered now, by way.
    [[nodiscard]] virtual Registrations registrations() const = 0;
    // Returns every lane, by peer in the order of add_peer; after close(), as they were before it.
    [[nodiscard]] virtual std::vector<LaneCounts> lanes() const = 0;

    // Makes a path to `peer` fail, through the NIC's own error machinery. For tests.
    virtual void inject_failure(std::uint32_t peer) = 0;

    // Stages a put-with-signal, cut into messages the NIC takes. A peer that sees the signal sees every byte
    // of the put.
    virtual PutResult put(const transport::PutCommand& command, PutCursor& cursor) = 0;
    // Posts everything staged to the NIC.
    virtual void ring() = 0;
    // Takes completions and arrivals; returns how many. 0 once failed.
    virtual int poll(SignalSink& sink) = 0;

    // mark() remembers under that number, below kMarks, everything that is staged or posted now;
    // reached_mark() returns true once all of that is complete locally.
    virtual void mark(std::uint32_t number) = 0;
    [[nodiscard]] virtual bool reached_mark(std::uint32_t number) const = 0;

    // The order of a sleep: arm(), poll once more, ppoll on descriptors(), settle(). settle() reads pending
    // asynchronous events too.
    virtual void arm() = 0;
    [[nodiscard]] virtual std::span<const int> descriptors() const = 0;
    virtual void settle() = 0;

    // Releases everything. Calling it twice is harmless.
    virtual void close() = 0;

    // Fails with INVALID_PUT: `why` states the reason why the command cannot be done. Proxy thread.
    void reject(const transport::PutCommand& command, const std::string& why) {
        const auto text = [](std::uint64_t number) { return std::to_string(number); };
        Failure failure;
        failure.status = "INVALID_PUT";
        failure.peer = command.peer;
        failure.message = "put of " + text(command.bytes) + " bytes of region " +
                          text(command.region) + " to rank " + text(command.peer) + ": " + why;
        fail(std::move(failure));
    }

    [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
    [[nodiscard]] std::optional<Failure> failure() const {
        const std::lock_guard lock(failure_mutex_);
        return failure_;
    }

  protected:
    // Records a failure; the first one stays.
    void fail(Failure failure) {
        const std::lock_guard lock(failure_mutex_);
        if (failure_) return;
        failure_ = std::move(failure);
        failed_.store(true, std::memory_order_release);
    }

  private:
    mutable std::mutex failure_mutex_;
    std::optional<Failure> failure_;
    std::atomic<bool> failed_{false};
};

}  // namespace mkernel::nics
