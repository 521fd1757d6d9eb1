#include "backends/nics/session.hpp"

namespace mkernel::nics {
namespace {

std::uint64_t deadline_after(double timeout_s) {
    // More than a century would overflow; nobody waits that long.
    const double limited = timeout_s < 0 ? 0 : (timeout_s > 3e9 ? 3e9 : timeout_s);
    return transport::monotonic_ns() + static_cast<std::uint64_t>(limited * 1e9);
}

}  // namespace

Session::Session(std::unique_ptr<Nic> nic, std::uint64_t fifo_slots)
    : nic_(std::move(nic)), fifo_(fifo_slots) {}

Session::~Session() {
    close();
}

Nic& Session::nic() const {
    if (closed_) throw SetupError("the NIC session is closed; open a new one");
    return *nic_;
}

void Session::start(std::uint64_t pad, const std::vector<int>& cpus) {
    Nic& nic = this->nic();
    if (proxy_) throw SetupError("the NIC session is started already");
    const transport::SignalPad signals(reinterpret_cast<void*>(pad));
    if (pad == 0 || !signals.valid()) {
        throw SetupError("there is no formatted signal pad at address " + std::to_string(pad) +
                         "; pass the address that the pad was formatted at");
    }
    pad_ = signals;
    proxy_ = std::make_unique<Proxy>(nic, fifo_, signals, cpus);
}

std::uint64_t Session::fifo() const {
    return reinterpret_cast<std::uint64_t>(&fifo_.handle());
}

transport::WaitResult Session::put(const transport::PutCommand& command, double timeout_s) {
    static_cast<void>(nic());
    if (!proxy_) throw SetupError("put before start: the NIC session has no proxy yet");
    transport::Diagnosis who;
    who.waiter = transport::Waiter::host;
    who.peer = command.peer;
    who.chunk = UINT32_MAX;
    return fifo_.handle().push(command, pad_, deadline_after(timeout_s), who);
}

bool Session::flush(double timeout_s) {
    static_cast<void>(nic());
    if (!proxy_) throw SetupError("flush before start: the NIC session has no proxy yet");
    return proxy_->flush(deadline_after(timeout_s));
}

bool Session::deregister(std::uint32_t region, double timeout_s) {
    Nic& nic = this->nic();
    // Waits twice: for the puts queued before, then for one that was begun meanwhile.
    const std::uint64_t deadline = deadline_after(timeout_s);
    const auto quiet = [&] { return !proxy_ || nic.failed() || proxy_->flush(deadline); };
    const bool drained = quiet();
    nic.withdraw(region);
    if (!drained || !quiet()) return false;
    nic.deregister_memory(region);
    return true;
}

ProxyStatistics Session::statistics() const {
    return proxy_ ? proxy_->statistics() : last_statistics_;
}

std::optional<Failure> Session::failure() const {
    return nic_->failure();
}

void Session::close() {
    if (closed_) return;
    closed_ = true;
    if (proxy_) {
        proxy_->stop();
        last_statistics_ = proxy_->statistics();
        proxy_.reset();
    }
    nic_->close();
}

}  // namespace mkernel::nics
