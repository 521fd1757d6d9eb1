#include "backends/nics/proxy.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <array>

namespace mkernel::nics {
namespace {

// Statistics have one writer: no read-modify-write is needed.
void bump(std::atomic<std::uint64_t>& counter, std::uint64_t by) {
    counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns the CPU time of the calling thread.
std::uint64_t cpu_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace

Proxy::Proxy(Nic& nic, transport::Fifo& fifo, transport::SignalPad pad,
             const std::vector<int>& cpus)
    : nic_(nic),
      fifo_(fifo),
      pad_(pad),
      waiting_(fifo.handle().capacity),
      completions_(fifo.handle().capacity) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE) {
            throw SetupError("proxy cpu " + std::to_string(cpu) +
                             " is not a CPU number; name CPUs in 0.." +
                             std::to_string(CPU_SETSIZE - 1));
        }
        CPU_SET(cpu, &set);
    }
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "mkernel-proxy");
    if (!cpus.empty()) {
        const int error = pthread_setaffinity_np(thread_.native_handle(), sizeof(set), &set);
        if (error != 0) {
            stop();
            throw SetupError("the proxy cannot be pinned to the given CPUs (errno " +
                             std::to_string(error) +
                             "); name CPUs of this machine that the job may use");
        }
    }
}

Proxy::~Proxy() {
    stop();
}

void Proxy::stop() {
    stop_.store(true, std::memory_order_seq_cst);
    fifo_.handle().wake();
    if (thread_.joinable()) thread_.join();
}

void Proxy::run() {
    ::prctl(PR_SET_TIMERSLACK, 1ul);  // naps are shorter than the 50 us that timers may be late by
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        bool worked = false;
        if (!halted()) worked = post();
        if (nic_.poll(*this) > 0) worked = true;
        if (!completions_.empty()) progress_completions();
        progress_flush();
        if (worked) {
            idle = 0;
            idle_since_ns_ = 0;
            napped_cpu_ns_ = 0;
        } else if (++idle < kSpins) {
            relax();
        } else if (lingers()) {
            napped_cpu_ns_ = 0;
            relax();
        } else {
            sleep();
            idle = 0;
        }
    }
}

// Reads the abort word, before every batch; the first failure of the NIC sets it.
bool Proxy::halted() {
    if (nic_.failed()) {
        if (!reported_) {
            reported_ = true;
            const auto failure = nic_.failure();
            transport::Diagnosis who;
            who.waiter = transport::Waiter::proxy;
            who.chunk = UINT32_MAX;
            who.peer = static_cast<std::uint32_t>(failure ? failure->peer : -1);
            pad_.abort(transport::AbortCode::nic_error, who);
        }
        return true;
    }
    return pad_.aborted() != transport::AbortCode::none;
}

bool Proxy::post() {
    bool worked = retry();
    worked |= post(fifo_.host(), flush_.host);
    worked |= post(fifo_.device(), flush_.device);
    nic_.ring();
    fifo_.release();
    set_aside_.store(waiting_.size(), std::memory_order_relaxed);
    return worked;
}

// `goal`: the ticket before which the flush under way covers the ring's commands.
bool Proxy::post(transport::FifoRing& ring, std::uint64_t goal) {
    bool worked = false;
    transport::PutCommand command;
    for (int n = 0; n < kBatch && has_room() && ring.pop(command); ++n) {
        worked = true;
        const std::uint64_t number = taken_++;
        if (ring.popped() == goal) flush_.commands = taken_;
        if (command.peer == transport::PutCommand::kSelf) {
            completions_.add(command, number);
            mark_completions();
            continue;
        }
        PutCursor cursor;
        if (!waiting_.has(command.peer)) {
            const PutResult result = put(command, cursor);
            if (result == PutResult::done) continue;
            if (result == PutResult::failed) break;
            bump(stalls_, 1);
        }
        waiting_.add(command, cursor, number);
    }
    return worked;
}

// Goes on with the commands that were set aside: peer by peer, each until its queue is full again.
bool Proxy::retry() {
    bool worked = false;
    for (std::size_t left = waiting_.peers(); left > 0; --left) {
        while (Waiting::Entry* entry = waiting_.first()) {
            const PutResult result = put(entry->command, entry->cursor);
            if (result == PutResult::failed) return worked;
            if (result == PutResult::busy) {
                waiting_.next_peer();
                break;
            }
            worked = true;
            if (waiting_.remove_first()) break;  // that peer has no more
        }
    }
    return worked;
}

PutResult Proxy::put(const transport::PutCommand& command, PutCursor& cursor) {
    const PutResult result = nic_.put(command, cursor);
    if (result != PutResult::done) return result;
    bump(puts_, 1);
    bump(put_bytes_, command.bytes);
    if (command.signal != transport::PutCommand::kNoSignal) bump(signals_sent_, 1);
    return result;
}

// Marks those whose earlier commands have all been posted.
void Proxy::mark_completions() {
    while (completions_.can_mark() && completions_.next_number() < waiting_.oldest(taken_)) {
        nic_.mark(completions_.take_mark());
    }
}

// Raises the completions that are due.
void Proxy::progress_completions() {
    while (!completions_.empty() && !nic_.failed()) {
        mark_completions();
        if (!completions_.marked() || !nic_.reached_mark(completions_.first_mark())) return;
        const transport::PutCommand& command = completions_.first();
        if (command.bytes != 0 || command.signal >= pad_.capacity()) {
            return nic_.reject(command, "a completion brings no bytes and raises a signal of " +
                                            std::to_string(pad_.capacity()) + ", not " +
                                            std::to_string(command.signal));
        }
        pad_.add(command.signal, command.value);
        completions_.remove_first();
    }
}

bool Proxy::raise(std::uint32_t, std::uint32_t signal, std::uint64_t value) {
    if (signal >= pad_.capacity()) return false;
    bump(signals_raised_, 1);  // first: who sees the signal sees it counted
    pad_.add(signal, value);
    return true;
}

// Begins a flush, unless flushes up to this number are over, or it is under way.
void Proxy::begin_flush() {
    if (flush_begun()) return;
    const std::uint64_t wanted = flush_wanted_.load(std::memory_order_seq_cst);
    if (wanted == flush_.number) return;
    flush_ = {wanted, fifo_.pushed(), fifo_.device().published(), taken_, false};
}

bool Proxy::flush_begun() const {
    return flush_.number != flushed_;
}

// Returns true when everything that the flush covers is with the NIC, whose mark for it was not set yet.
bool Proxy::flush_due() {
    return flush_begun() && !flush_.marked && !halted() && fifo_.host().popped() >= flush_.host &&
           fifo_.device().popped() >= flush_.device && waiting_.oldest(taken_) >= flush_.commands;
}

void Proxy::progress_flush() {
    begin_flush();
    if (flush_due()) {
        nic_.mark(kFlushMark);
        flush_.marked = true;
    }
    if (!flush_.marked || nic_.failed() || !nic_.reached_mark(kFlushMark)) return;
    if (completions_.oldest(taken_) < flush_.commands) return;
    flush_.marked = false;
    std::atomic_ref(flushed_).store(flush_.number, std::memory_order_seq_cst);
    transport::wake_all(transport::low_half(&flushed_), transport::Reach::process);
}

bool Proxy::flush(std::uint64_t deadline_ns) {
    const std::uint64_t number = flush_wanted_.fetch_add(1, std::memory_order_seq_cst) + 1;
    fifo_.handle().wake();
    const std::atomic_ref<std::uint64_t> flushed(flushed_);
    while (true) {
        const std::uint64_t seen = flushed.load(std::memory_order_seq_cst);
        if (seen >= number) return true;
        if (nic_.failed() || pad_.aborted() != transport::AbortCode::none) return false;
        if (stop_.load(std::memory_order_relaxed)) return false;
        const std::uint64_t now = transport::monotonic_ns();
        if (now >= deadline_ns) return false;
        transport::sleep_while(transport::low_half(&flushed_), static_cast<std::uint32_t>(seen),
                               std::min(deadline_ns - now, transport::SignalPad::kMaxSleepNs),
                               transport::Reach::process);
    }
}

// Returns true for a while after a device's push, which is likely to be followed by more, of which nothing
// notifies the proxy.
bool Proxy::lingers() {
    if (!fifo_.device_claimed()) return false;
    const std::uint64_t now = transport::monotonic_ns();
    if (idle_since_ns_ == 0) idle_since_ns_ = now;
    return awaits(now) || now - idle_since_ns_ < kAwakeNs;
}

// Returns true while work that the host announced has not pushed yet.
bool Proxy::awaits(std::uint64_t now) {
    const std::uint64_t awaited = fifo_.awaited();
    if (awaited != awaited_) {
        awaited_ = awaited;
        awaited_since_ = now;
        awaited_after_ = fifo_.device().popped();
    }
    if (awaited_since_ == 0) return false;
    if (fifo_.device().popped() != awaited_after_ || now - awaited_since_ > kAwaitedNs) {
        awaited_since_ = 0;
    }
    return awaited_since_ != 0;
}

void Proxy::sleep() {
    fifo_.prepare_sleep();
    if (!nic_.failed()) nic_.arm();
    // Anything that came between the last look and the arming: see it now, or it wakes us.
    begin_flush();
    const bool open = !halted() && has_room();
    const bool news = stop_.load(std::memory_order_seq_cst) || (open && fifo_.ready()) ||
                      nic_.poll(*this) > 0 || flush_due() || (nic_.failed() && !reported_);
    if (news || !open || !fifo_.device_claimed()) napped_cpu_ns_ = 0;
    if (!news) {
        std::array<pollfd, 1 + kMaxDescriptors> wait{};
        std::size_t count = 0;
        wait[count++] = {fifo_.wake_fd(), POLLIN, 0};
        if (!nic_.failed()) {
            for (const int fd : nic_.descriptors()) {
                if (count < wait.size()) wait[count++] = {fd, POLLIN, 0};
            }
        }
        const int most_ms = waiting_.size() != 0 ? kWaitingSleepMs : kMaxSleepMs;
        if (open && fifo_.device_claimed()) {
            nap({wait.data(), count}, most_ms);
        } else {
            ::poll(wait.data(), count, most_ms);
        }
    }
    fifo_.end_sleep();
    if (!nic_.failed()) nic_.settle();
}

// Sleeps until a device's commands, too, end the sleep. The looks since the last one are charged to its naps,
// since they cost much where code is slow; not where something woke that one, or commands wait for their
// peers.
void Proxy::nap(std::span<pollfd> descriptors, int most_ms) {
    const std::uint64_t end =
        transport::monotonic_ns() + static_cast<std::uint64_t>(most_ms) * 1'000'000u;
    const std::uint64_t cpu_before = napped_cpu_ns_ != 0 ? napped_cpu_ns_ : cpu_ns();
    bool undisturbed = true;
    do {
        const timespec length{0, static_cast<long>(nap_ns_)};
        ++naps_;
        undisturbed = ::ppoll(descriptors.data(), descriptors.size(), &length, nullptr) == 0;
    } while (undisturbed && !fifo_.device().ready() && transport::monotonic_ns() < end);
    const std::uint64_t cpu_after = cpu_ns();
    naps_cpu_ns_ += cpu_after - cpu_before;
    napped_cpu_ns_ = undisturbed && waiting_.size() == 0 ? cpu_after : 0;
    constexpr std::uint64_t kEnoughNaps = 32;
    if (naps_ < kEnoughNaps) return;
    const double fair_ns =
        static_cast<double>(naps_cpu_ns_) / static_cast<double>(naps_) / kNapShare;
    nap_ns_ = std::clamp(static_cast<std::uint64_t>(fair_ns), kNapNs, kMaxNapNs);
    naps_ = naps_cpu_ns_ = 0;
}

ProxyStatistics Proxy::statistics() const {
    const auto get = [](const std::atomic<std::uint64_t>& counter) {
        return counter.load(std::memory_order_relaxed);
    };
    return {get(puts_),
            get(put_bytes_),
            get(signals_sent_),
            get(signals_raised_),
            fifo_.depth() + get(set_aside_),
            get(stalls_)};
}

}  // namespace mkernel::nics
