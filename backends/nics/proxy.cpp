#include "backends/nics/proxy.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>

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

}  // namespace

Proxy::Proxy(Nic& nic, transport::Fifo& fifo, transport::SignalPad pad,
             const std::vector<int>& cpus)
    : nic_(nic), fifo_(fifo), pad_(pad), waiting_(fifo.device().capacity) {
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
    fifo_.device().wake();
    if (thread_.joinable()) thread_.join();
}

void Proxy::run() {
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        bool worked = false;
        if (!halted()) worked = post();
        if (nic_.poll(*this) > 0) worked = true;
        progress_flush();
        if (worked) {
            idle = 0;
        } else if (++idle < kSpins) {
            relax();
        } else {
            sleep();
            idle = 0;
        }
    }
}

// The abort word is looked at before every batch; the first failure of the NIC sets it.
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
    for (int n = 0; n < kBatch && !waiting_.full(); ++n) {
        const std::uint64_t ticket = fifo_.popped();
        transport::PutCommand command;
        if (!fifo_.pop(command)) break;
        worked = true;
        PutCursor cursor;
        if (!waiting_.has(command.peer)) {
            const PutResult result = put(command, cursor);
            if (result == PutResult::done) continue;
            if (result == PutResult::failed) break;
            bump(stalls_, 1);
        }
        waiting_.add(command, cursor, ticket);
    }
    nic_.ring();
    fifo_.release();
    set_aside_.store(waiting_.size(), std::memory_order_relaxed);
    return worked;
}

// Goes on with what was set aside: peer by peer, each until its queue is full again.
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

bool Proxy::raise(std::uint32_t, std::uint32_t signal, std::uint64_t value) {
    if (signal >= pad_.capacity()) return false;
    bump(signals_raised_, 1);  // first: who sees the signal sees it counted
    pad_.add(signal, value);
    return true;
}

// A flush waits and everything it covers is with the NIC.
bool Proxy::flush_due() {
    const std::uint64_t wanted = flush_wanted_.load(std::memory_order_seq_cst);
    return !marked_ && !halted() &&
           wanted > std::atomic_ref(flushed_).load(std::memory_order_relaxed) &&
           fifo_.popped() >= wanted && waiting_.oldest(fifo_.popped()) >= wanted;
}

// One mark at a time: it stands for every ticket before the oldest command that was not with the
// NIC when it was set.
void Proxy::progress_flush() {
    if (flush_due()) {
        nic_.mark();
        marked_ = true;
        marked_at_ = waiting_.oldest(fifo_.popped());
    }
    if (!marked_ || nic_.failed() || !nic_.reached_mark()) return;
    marked_ = false;
    std::atomic_ref(flushed_).store(marked_at_, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&flushed_), FUTEX_WAKE_PRIVATE, INT_MAX,
            nullptr, nullptr, 0);
}

bool Proxy::flush(std::uint64_t deadline_ns) {
    const std::uint64_t target = fifo_.pushed();
    std::uint64_t wanted = flush_wanted_.load(std::memory_order_relaxed);
    while (wanted < target && !flush_wanted_.compare_exchange_weak(wanted, target)) {
    }
    fifo_.device().wake();
    const std::atomic_ref<std::uint64_t> flushed(flushed_);
    while (true) {
        const std::uint64_t seen = flushed.load(std::memory_order_seq_cst);
        if (seen >= target) return true;
        if (nic_.failed() || pad_.aborted() != transport::AbortCode::none) return false;
        if (stop_.load(std::memory_order_relaxed)) return false;
        const std::uint64_t now = transport::monotonic_ns();
        if (now >= deadline_ns) return false;
        const timespec limit{
            0, static_cast<long>(std::min(deadline_ns - now, transport::SignalPad::kMaxSleepNs))};
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&flushed_), FUTEX_WAIT_PRIVATE,
                static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
    }
}

void Proxy::sleep() {
    fifo_.prepare_sleep();
    if (!nic_.failed()) nic_.arm();
    // Whatever came between the last look and the arming: see it now, or it wakes us.
    const bool news = stop_.load(std::memory_order_seq_cst) ||
                      (!halted() && !waiting_.full() && fifo_.ready()) || nic_.poll(*this) > 0 ||
                      flush_due() || (nic_.failed() && !reported_);
    if (!news) {
        std::array<pollfd, 1 + kMaxDescriptors> wait{};
        nfds_t count = 0;
        wait[count++] = {fifo_.wake_fd(), POLLIN, 0};
        if (!nic_.failed()) {
            for (const int fd : nic_.descriptors()) {
                if (count < wait.size()) wait[count++] = {fd, POLLIN, 0};
            }
        }
        ::poll(wait.data(), count, waiting_.size() != 0 ? kWaitingSleepMs : kMaxSleepMs);
    }
    fifo_.end_sleep();
    if (!nic_.failed()) nic_.settle();
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
