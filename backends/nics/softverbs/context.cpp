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
constexpr std::uint64_t kLingerNs = 500'000;       // with regions of device memory
constexpr std::uint64_t kMaxSleepNs = 50'000'000;  // in case a waker died before it woke us

// The open contexts whose device writes wait for a flush.
class OpenContexts {
  public:
    void add(Context* context) {
        const std::lock_guard lock(mutex_);
        all_.push_back(context);
    }
    void remove(const Context* context) {
        const std::lock_guard lock(mutex_);
        std::erase(all_, context);
    }
    void show_unflushed() {
        const std::lock_guard lock(mutex_);
        for (Context* each : all_) {
            const Control control(*each);
            each->show_unflushed();
        }
    }

  private:
    std::mutex mutex_;
    std::vector<Context*> all_;
};

OpenContexts& open_contexts() {
    static OpenContexts contexts;
    return contexts;
}

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
    if (config.unflushed) {
        open_contexts().add(this);
        if (mover() != nullptr) {
            mover()->flushed.store([] { open_contexts().show_unflushed(); });
        }
    }
    try {
        engine_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
        open_contexts().remove(this);
        throw;
    }
    pthread_setname_np(engine_.native_handle(), "softverbs");
}

Context::~Context() {
    open_contexts().remove(this);
    stop_.store(true, std::memory_order_seq_cst);
    wake();
    engine_.join();
    qps.clear();
    offers.forget_all(copies);
}

Qp* Context::create_qp(const ibv_qp_init_attr& init) {
    if (qps.size() >= kMaxQps) {
        errno = ENOMEM;
        return nullptr;
    }
    // Round robin, so that a ring rests before it serves another queue pair.
    while (std::any_of(qps.begin(), qps.end(),
                       [this](const auto& qp) { return ring_of(qp->qp_num) == next_ring_; })) {
        to_next_ring();
    }
    const std::uint32_t number = ((generation_ << 9) | next_ring_) & 0xffffff;
    to_next_ring();
    qps.push_back(std::make_unique<Qp>(*this, init, number));
    return qps.back().get();
}

void Context::to_next_ring() {
    next_ring_ = (next_ring_ + 1) % kMaxQps;
    if (next_ring_ == 0) generation_ = generation_ % 0x7fff + 1;
}

void Context::destroy_qp(Qp* qp) {
    static_cast<Cq*>(qp->send_cq)->forget(qp);
    static_cast<Cq*>(qp->recv_cq)->forget(qp);
    std::erase_if(qps, [qp](const auto& each) { return each.get() == qp; });
}

std::shared_ptr<RemotePort> Context::connect(const PortAddress& address) {
    forget_expired();
    const auto found = remotes_.find(address.cookie);
    if (found != remotes_.end()) {
        if (auto port = found->second.port.lock()) return port;
    }
    auto made = std::make_shared<RemotePort>(address);
    Remote& remote = remotes_[address.cookie];
    remote.port = made;
    for (const Mr* mr : device_regions_) tell(remote, *mr, mr->length);
    return made;
}

void Context::forget_expired() {
    std::erase_if(remotes_, [this](const auto& each) {
        if (!each.second.port.expired()) return false;
        offers.forget(each.first, copies);
        return true;
    });
}

// ---- device memory

void Context::tell(Remote& remote, const Mr& mr, std::uint64_t length) {
    Offers::Message message;
    message.from = port.address().cookie;
    message.token = mr.device->token;
    message.length = length;
    message.memory = mr.device->exported;
    remote.outbox.emplace_back(message, length != 0 ? mr.device->fd : nullptr);
    flush(remote);
}

bool Context::flush(Remote& remote) {
    const auto peer = remote.port.lock();
    while (peer && !remote.outbox.empty()) {
        const auto& [message, fd] = remote.outbox.front();
        const bool sent = offers.send(peer->cookie(), message, fd ? fd->get() : -1);
        if (sent) {
            remote.outbox.pop_front();
            peer->header().offered.fetch_add(1, std::memory_order_seq_cst);
        }
        ring_doorbell(peer->header());
        if (!sent) return told_all_ = false;
    }
    return true;
}

bool Context::told(RemotePort& peer) {
    const auto found = remotes_.find(peer.cookie());
    return found == remotes_.end() || flush(found->second);
}

void Context::offer(const Mr& mr) {
    device_regions_.push_back(&mr);
    has_device_regions_ = true;
    for (auto& [cookie, remote] : remotes_) tell(remote, mr, mr.length);
}

void Context::withdraw(const Mr& mr) {
    std::erase(device_regions_, &mr);
    has_device_regions_ = !device_regions_.empty();
    copies.drain();
    std::erase_if(unshown_bytes_, [&mr](const UnshownBytes& each) { return each.rkey == mr.rkey; });
    for (auto& [cookie, remote] : remotes_) tell(remote, mr, 0);
}

// Sends and receives offers; returns whether anything was sent or came.
bool Context::exchange_offers() {
    bool worked = false;
    const std::uint32_t offered = port.header().offered.load(std::memory_order_seq_cst);
    if (offered != offers_seen_) {
        offers_seen_ = offered;
        offers.receive(copies);
        worked = true;
    }
    if (!told_all_) {
        told_all_ = true;
        for (auto& [cookie, remote] : remotes_) flush(remote);
        worked = true;
    }
    return worked;
}

PayloadSource Context::find_payload(RemotePort& from, std::uint8_t flags, std::int32_t fd,
                                    std::uint64_t file, std::uint64_t offset,
                                    std::uint32_t length) {
    if ((flags & kDevice) == 0) return {from.reference(fd, file, offset, length), 0};
    std::uint64_t address = offers.find(from.cookie(), file, offset, length);
    if (address == 0) {  // it was offered before the packet was sent
        offers.receive(copies);
        address = offers.find(from.cookie(), file, offset, length);
    }
    return {nullptr, address};
}

std::vector<std::byte> Context::fetch(std::uint64_t address, std::size_t bytes) {
    std::vector<std::byte> read(bytes);
    if (!copies.copy(reinterpret_cast<std::uint64_t>(read.data()), address, bytes)) read.clear();
    return read;
}

Context::Placed Context::place(const Mr& mr, std::uint64_t address, const PayloadSource& from,
                               std::size_t bytes, DeviceCopies::Batch& batch, std::uint64_t due) {
    batch = 0;
    const bool waits = config.late_ns != 0 || (mr.device && config.unflushed);
    // Bytes that must be seen on the way pass through here; the rest is copied from memory to memory.
    std::vector<std::byte> payload;
    const std::byte* host = from.host;
    if (host == nullptr && (!mr.device || waits || config.scramble != 0)) {
        payload = fetch(from.device, bytes);
        if (payload.size() != bytes) return Placed::busy;  // it failed: nothing ends any more
        host = payload.data();
    }
    if (!mr.device && !waits) {
        place_bytes(config, address, host, bytes);
        return Placed::now;
    }
    if (waits || config.scramble != 0) {
        std::vector<std::byte> changed(bytes);
        place_bytes(config, reinterpret_cast<std::uint64_t>(changed.data()), host, bytes);
        payload = std::move(changed);
        host = payload.data();
    }
    if (waits) {
        const std::uint64_t until = config.late_ns != 0 ? now_ns() + config.late_ns : UINT64_MAX;
        unshown_bytes_.push_back({mr.rkey, address, std::move(payload), until});
        return Placed::now;
    }
    const std::uint64_t source =
        host != nullptr ? reinterpret_cast<std::uint64_t>(host) : from.device;
    const auto queued = copies.queue(address, source, bytes, due);
    if (!queued) return Placed::busy;
    batch = *queued;
    return Placed::later;
}

std::optional<DeviceCopies::Batch> Context::place_ahead(const Mr& mr, std::uint64_t address,
                                                        const PayloadSource& from,
                                                        std::size_t bytes, std::uint64_t arrival) {
    const bool seen_on_the_way = config.unflushed || config.late_ns != 0 || config.scramble != 0;
    if (!mr.device || from.device == 0 || seen_on_the_way) return std::nullopt;
    const std::uint64_t lead = link.lead(copies.waiting() + bytes);
    return copies.queue(address, from.device, bytes, arrival > lead ? arrival - lead : 1);
}

void Context::show_unflushed() {
    if (config.unflushed) show_bytes(UINT64_MAX);
}

// Shows the bytes that are due. Regions deregistered meanwhile are left alone.
void Context::show_bytes(std::uint64_t now) {
    while (!unshown_bytes_.empty() && unshown_bytes_.front().until <= now) {
        const UnshownBytes each = std::move(unshown_bytes_.front());
        unshown_bytes_.pop_front();
        const Mr* mr = regions.find(each.rkey);
        if (mr == nullptr || !mr->contains(each.address, each.bytes.size())) continue;
        if (mr->device) {
            copies.copy(each.address, reinterpret_cast<std::uint64_t>(each.bytes.data()),
                        each.bytes.size());
        } else {
            std::memcpy(reinterpret_cast<void*>(each.address), each.bytes.data(),
                        each.bytes.size());
        }
    }
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
    if (unshown_.empty() || unshown_.back() != &to) unshown_.push_back(&to);
    if (to.overrun.load(std::memory_order_relaxed) || to.push(entry)) return true;
    raise_event(IBV_EVENT_CQ_ERR, nullptr, queue);
    return false;
}

void Context::show_completions() {
    for (Cq* each : unshown_) each->show();
    unshown_.clear();
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
    bool worked = exchange_offers();
    worked |= copies.poll(now);
    if (config.late_ns != 0) show_bytes(now);
    if (!unshown_bytes_.empty()) wake_at = std::min(wake_at, unshown_bytes_.front().until);
    for (const auto& qp : qps) worked |= qp->step(now, wake_at);
    worked |= fabric.step(now, wake_at);
    show_completions();
    copies.submit(now);
    if (copies.failed() && !failure_raised_) {
        failure_raised_ = true;
        raise_event(IBV_EVENT_DEVICE_FATAL, nullptr, nullptr);
    }
    return worked || (!copies.idle() && !copies.failed());
}

void Context::run() {
    int idle = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        std::uint64_t wake_at = UINT64_MAX;
        if (round(wake_at)) {
            idle = 0;
            worked_at_ = now_ns();
        } else if (++idle >= kSpins && !lingers()) {
            sleep();
            idle = 0;
        } else {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
}

void Context::await() {
    if (!has_device_regions_.load(std::memory_order_relaxed)) return;
    awaited_.fetch_add(1, std::memory_order_relaxed);
    wake();
}

// A card wakes in no time. With accelerators, whose messages are few and awaited, an engine stays awake for a
// while, and as long as any thread polls.
bool Context::lingers() {
    if (const std::uint64_t awaited = awaited_.load(std::memory_order_relaxed);
        awaited != awaited_seen_) {
        awaited_seen_ = awaited;
        worked_at_ = now_ns();
    }
    return has_device_regions_.load(std::memory_order_relaxed) && now_ns() - worked_at_ < kLingerNs;
}

// Announces the sleep, looks once more, then sleeps: a thread that brings work writes it before it looks at
// `sleeping`, so one of the two sees the other.
void Context::sleep() {
    auto& sleeping = port.header().sleeping;
    sleeping.store(1, std::memory_order_seq_cst);
    std::uint64_t wake_at = UINT64_MAX;
    const bool worked = round(wake_at);
    if (!worked) {
        const std::lock_guard lock(control);
        forget_expired();
    }
    const std::uint64_t now = now_ns();
    if (!worked && !stop_.load(std::memory_order_seq_cst) && wake_at > now) {
        const std::uint64_t pause = std::min(wake_at - now, kMaxSleepNs);
        const timespec limit{0, static_cast<long>(pause)};
        syscall(SYS_futex, &sleeping, FUTEX_WAIT, 1, &limit, nullptr, 0);
    }
    sleeping.store(0, std::memory_order_seq_cst);
}

}  // namespace mkernel::nics::softverbs
