#include "backends/nics/softverbs/faults.hpp"

#include <algorithm>

namespace mkernel::nics::softverbs {

bool Faults::due(const Planned& planned, std::uint64_t now) const {
    const Fault& fault = planned.fault;
    if (fault.timed) return now >= planned.opened + fault.after;
    return fault.after <= (fault.kind == FaultKind::registration ? registrations_ : messages_);
}

bool Faults::strikes(FaultKind kind, std::uint64_t now) {
    for (Planned& each : planned_) {
        if (each.fault.kind != kind || each.begun || !due(each, now)) continue;
        each.begun = true;
        return true;
    }
    return false;
}

void Faults::begin_counted(std::uint64_t now) {
    for (Planned& each : planned_) {
        const FaultKind kind = each.fault.kind;
        if (kind != FaultKind::cut && kind != FaultKind::stall) continue;
        if (each.begun || each.fault.timed || !due(each, now)) continue;
        each.begun = true;
        each.since = now;
    }
}

bool Faults::lasts(FaultKind kind, std::uint64_t now, std::uint64_t& wake_at) {
    bool on = false;
    for (Planned& each : planned_) {
        if (each.fault.kind != kind) continue;
        if (!each.begun && each.fault.timed && due(each, now)) {
            each.begun = true;
            each.since = now;
        }
        if (!each.begun) {
            if (each.fault.timed) wake_at = std::min(wake_at, each.opened + each.fault.after);
        } else if (each.fault.for_ns == 0) {
            on = true;
        } else if (now < each.since + each.fault.for_ns) {
            on = true;
            wake_at = std::min(wake_at, each.since + each.fault.for_ns);
        }
    }
    return on;
}

}  // namespace mkernel::nics::softverbs
