// Python's ends of the command FIFO: kernels and proxies that are written in Python.
#include "backends/transport/fifo_bindings.hpp"

#include <poll.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "backends/transport/clock.hpp"
#include "backends/transport/fifo.hpp"
#include "backends/transport/signal_pad.hpp"

namespace py = pybind11;

namespace mkernel::transport {

namespace {

// A put's arguments in the order of NicSession.put: peer, region, local, remote, bytes, signal, value.
using Command = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t,
                           std::uint64_t, std::uint32_t, std::uint32_t>;

std::optional<Command> pop(Fifo& fifo, double timeout_s) {
    constexpr std::uint64_t kNapNs = 1'000'000;  // a device that pushes wakes nobody
    const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_s * 1e9);
    while (true) {
        PutCommand found;
        if (fifo.host().pop(found) || fifo.device().pop(found)) {
            return Command{found.peer,  found.region, found.local_offset, found.remote_offset,
                           found.bytes, found.signal, found.value};
        }
        const std::uint64_t now = monotonic_ns();
        if (now >= deadline) return std::nullopt;
        fifo.prepare_sleep();
        if (!fifo.ready()) {
            std::uint64_t left = deadline - now;
            if (fifo.device_claimed()) left = std::min(left, kNapNs);
            const timespec limit{static_cast<time_t>(left / 1'000'000'000),
                                 static_cast<long>(left % 1'000'000'000)};
            pollfd woken{fifo.wake_fd(), POLLIN, 0};
            ::ppoll(&woken, 1, &limit, nullptr);
        }
        fifo.end_sleep();
    }
}

}  // namespace

void bind_fifo(py::module_& module) {
    py::class_<Fifo>(module, "Fifo")
        .def(py::init<std::uint64_t>(), py::arg("slots"))
        .def_property_readonly(
            "handle",
            [](const Fifo& fifo) { return reinterpret_cast<std::uintptr_t>(&fifo.handle()); })
        .def_property_readonly("depth", &Fifo::depth)
        .def("pop", &pop, py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
        .def("release", &Fifo::release);
    module.def(
        "fifo_push",
        [](std::uintptr_t handle, std::uintptr_t pad, const Command& command, double timeout_s,
           const Diagnosis& who) {
            PutCommand put;
            std::tie(put.peer, put.region, put.local_offset, put.remote_offset, put.bytes,
                     put.signal, put.value) = command;
            return reinterpret_cast<const FifoHandle*>(handle)->push(
                put, SignalPad(reinterpret_cast<void*>(pad)),
                monotonic_ns() + static_cast<std::uint64_t>(timeout_s * 1e9), who);
        },
        py::arg("fifo"), py::arg("pad"), py::arg("command"), py::arg("timeout_s"),
        py::arg("who") = Diagnosis{}, py::call_guard<py::gil_scoped_release>());
}

}  // namespace mkernel::transport
