#include "backends/nics/softverbs/context.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace mkernel::nics::softverbs {
namespace {

constexpr int kSpins = 50;                         // empty rounds before the engine sleeps
constexpr std::uint64_t kMaxSleepNs = 50'000'000;  // in case a waker died before it woke us

}  // namespace

Control::Control(Context& context) {
    context.control_waiting.fetch_add(1, std::memory_order_seq_cst);
    lock_ = std::unique_lock(context.control);
    context.control_waiting.fetch_sub(1, std::memory_order_seq_cst);
}

Context::Context(ibv_device* opened) : verbs_context{}, config(Config::from_environment()) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
        throw std::system_error(errno, std::generic_category(), "pipe of asynchronous events");
    }
    async_read = Fd(ends[0]);
    async_write = Fd(ends[1]);
    ::fcntl(async_write.get(), F_SETFL, O_NONBLOCK);
    context.device = opened;
    context.cmd_fd = -1;
    context.async_fd = async_read.get();
    context.num_comp_vectors = 1;
    context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    sz = sizeof(verbs_context);
    engine_ = std::thread([this] { run(); });
    pthread_setname_np(engine_.native_handle(), "softverbs");
}

Context::~Context() {
    stop_.store(true, std::memory_order_seq_cst);
    wake();
    engine_.join();
    qps.clear();
}

Qp* Context::create_qp(const ibv_qp_init_attr& init) {
    if (qps.size() >= kMaxQps) {
        errno = ENOMEM;
        return nullptr;
    }
    // Round robin, so that a ring rests before it serves another queue pair.
    while (std::any_of(qps.begin(), qps.end(),
                       [this](const auto& qp) { return ring_of(qp->qp_num) == next_ring_; })) {
        next_ring_ = (next_ring_ + 1) % kMaxQps;
    }
    const std::uint32_t number = ((generation_ << 9) | next_ring_) & 0xffffff;
    next_ring_ = (next_ring_ + 1) % kMaxQps;
    if (next_ring_ == 0) generation_ = generation_ % 0x7fff + 1;
    qps.push_back(std::make_unique<Qp>(*this, init, number));
    return qps.back().get();
}

void Context::destroy_qp(Qp* qp) {
    static_cast<Cq*>(qp->send_cq)->forget(qp);
    static_cast<Cq*>(qp->recv_cq)->forget(qp);
    std::erase_if(qps, [qp](const auto& each) { return each.get() == qp; });
}

std::shared_ptr<RemotePort> Context::connect(const PortAddress& address) {
    std::erase_if(remotes_, [](const auto& each) { return each.second.expired(); });
    auto& known = remotes_[address.cookie];
    auto remote = known.lock();
    if (!remote) {
        remote = std::make_shared<RemotePort>(address);
        known = remote;
    }
    return remote;
}

void Context::raise_event(ibv_event_type type, ibv_qp* qp, ibv_cq* cq) {
    ibv_async_event event{};
    event.event_type = type;
    if (qp != nullptr) event.element.qp = qp;
    if (cq != nullptr) event.element.cq = cq;
    [[maybe_unused]] const ssize_t written = ::write(async_write.get(), &event, sizeof(event));
}

bool Context::complete(ibv_cq* queue, const Cq::Entry& entry) {
    auto& to = *static_cast<Cq*>(queue);
    if (to.overrun.load(std::memory_order_relaxed) || to.push(entry)) return true;
    raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
    return false;
}

Context::Struck Context::strike(Cq& queue, std::uint64_t now) {
    if (faults.none()) return {};
    faults.begin_counted(now);
    const Struck struck{faults.strikes(FaultKind::drop, now),
                        faults.strikes(FaultKind::cq_overflow, now),
                        faults.strikes(FaultKind::qp_error, now)};
    if (struck.overflow) {
        queue.overrun.store(true, std::memory_order_relaxed);
        raise_event(IBV_EVENT_CQ_ERR, nullptr, &queue);
    }
    return struck;
}

bool Context::mute(std::uint64_t now) {
    if (faults.none()) return false;
    std::uint64_t whenever = 0;
    return faults.lasts(FaultKind::stall, now, whenever) ||
           faults.lasts(FaultKind::cut, now, whenever);
}

bool Context::round(std::uint64_t& wake_at) {
    while (control_waiting.load(std::memory_order_seq_cst) != 0) sched_yield();
    const std::lock_guard lock(control);
    const std::uint64_t now = now_ns();
    if (!faults.none()) {
        const bool stalled = faults.lasts(FaultKind::stall, now, wake_at);
        const bool cut = faults.lasts(FaultKind::cut, now, wake_at);
        port.header().silent.store(stalled || cut ? 1 : 0, std::memory_order_release);
        if (stalled) return false;
    }
    bool worked = false;
    for (const auto& qp : qps) worked |= qp->step(now, wake_at);
    worked |= fabric.step(now, wake_at);
    return worked;
}

void Context::run() {
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        std::uint64_t wake_at = UINT64_MAX;
        if (round(wake_at)) {
            idle = 0;
        } else if (++idle >= kSpins) {
            sleep();
            idle = 0;
        } else {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
}

// Announce the sleep, look once more, then sleep: whoever gives us work writes it before it looks
// at `sleeping`, so one of the two sees the other.
void Context::sleep() {
    auto& sleeping = port.header().sleeping;
    sleeping.store(1, std::memory_order_seq_cst);
    std::uint64_t wake_at = UINT64_MAX;
    const bool worked = round(wake_at);
    const std::uint64_t now = now_ns();
    if (!worked && !stop_.load(std::memory_order_seq_cst) && wake_at > now) {
        const std::uint64_t pause = std::min(wake_at - now, kMaxSleepNs);
        const timespec limit{0, static_cast<long>(pause)};
        syscall(SYS_futex, &sleeping, FUTEX_WAIT, 1, &limit, nullptr, 0);
    }
    sleeping.store(0, std::memory_order_seq_cst);
}

}  // namespace mkernel::nics::softverbs
