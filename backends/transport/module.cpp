// Python's view of a signal pad: it formats the pad, and reads and writes its counters and its abort record.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "backends/transport/fifo_bindings.hpp"
#include "backends/transport/signal_pad.hpp"

namespace py = pybind11;
using namespace mkernel::transport;

namespace {

SignalPad checked(std::uintptr_t address) {
    SignalPad pad(reinterpret_cast<void*>(address));
    if (address == 0 || !pad.valid()) {
        throw std::invalid_argument("no signal pad at address " + std::to_string(address) +
                                    "; format it first");
    }
    return pad;
}

SignalPad checked(std::uintptr_t address, std::uint32_t index) {
    SignalPad pad = checked(address);
    if (index >= pad.capacity()) {
        throw std::out_of_range("signal " + std::to_string(index) + " of a pad of " +
                                std::to_string(pad.capacity()));
    }
    return pad;
}

}  // namespace

PYBIND11_MODULE(_transport, module) {
    module.doc() =
        "Signal pads in host memory (see signal_pad.hpp), what their words hold (signal.hpp), and "
        "the "
        "command FIFO (fifo.hpp).";

    py::enum_<AbortCode>(module, "AbortCode")
        .value("none", AbortCode::none)
        .value("timeout", AbortCode::timeout)
        .value("peer_failure", AbortCode::peer_failure)
        .value("nic_error", AbortCode::nic_error)
        .value("cancelled", AbortCode::cancelled);
    py::enum_<Waiter>(module, "Waiter")
        .value("none", Waiter::none)
        .value("comm_kernel", Waiter::comm_kernel)
        .value("compute_kernel", Waiter::compute_kernel)
        .value("proxy", Waiter::proxy)
        .value("host", Waiter::host);
    py::enum_<WaitResult>(module, "WaitResult")
        .value("ok", WaitResult::ok)
        .value("aborted", WaitResult::aborted)
        .value("timed_out", WaitResult::timed_out);
    py::class_<Diagnosis>(module, "Diagnosis")
        .def(py::init<>())
        .def_readwrite("waiter", &Diagnosis::waiter)
        .def_readwrite("core", &Diagnosis::core)
        .def_readwrite("signal", &Diagnosis::signal)
        .def_readwrite("peer", &Diagnosis::peer)
        .def_readwrite("chunk", &Diagnosis::chunk)
        .def_readwrite("op", &Diagnosis::op)
        .def_readwrite("seen", &Diagnosis::seen)
        .def_readwrite("wanted", &Diagnosis::wanted);

    module.attr("MOST_SIGNALS") = SignalPad::kMostSignals;
    module.def("pad_bytes", &SignalPad::bytes, py::arg("capacity"));
    module.def(
        "pad_format",
        [](std::uintptr_t address, std::uint32_t capacity) {
            SignalPad::format(reinterpret_cast<void*>(address), capacity);
        },
        py::arg("address"), py::arg("capacity"));
    module.def(
        "pad_load",
        [](std::uintptr_t address, std::uint32_t index) {
            return checked(address, index).load(index);
        },
        py::arg("address"), py::arg("index"));
    module.def(
        "pad_add",
        [](std::uintptr_t address, std::uint32_t index, std::uint64_t value) {
            checked(address, index).add(index, value);
        },
        py::arg("address"), py::arg("index"), py::arg("value"));
    // Used for devices, which write words and wait for them by their addresses.
    module.def(
        "word_address",
        [](std::uintptr_t address, std::uint32_t index) {
            return reinterpret_cast<std::uintptr_t>(checked(address, index).word(index));
        },
        py::arg("address"), py::arg("index"));
    module.def(
        "word_range",
        [](std::uintptr_t address, std::uint32_t first, std::uint32_t count) {
            if (count == 0) throw std::invalid_argument("a range of no words");
            const Word* begin = checked(address, first).word(first);
            const Word* last = checked(address, first + (count - 1)).word(first + (count - 1));
            return py::make_tuple(reinterpret_cast<std::uintptr_t>(begin),
                                  reinterpret_cast<std::uintptr_t>(last + 1));
        },
        py::arg("address"), py::arg("first"), py::arg("count"));
    module.def(
        "message_number",
        [](std::uint64_t call, std::uint64_t message) {
            if ((message >> kMessageBits) != 0 || message_number(call, 0) >= kEndsWaits) {
                throw std::out_of_range("message " + std::to_string(message) + " of call " +
                                        std::to_string(call) + ": a call has at most " +
                                        std::to_string((1u << kMessageBits) - 1) + " messages");
            }
            return message_number(call, message);
        },
        py::arg("call"), py::arg("message"));
    module.def(
        "pad_end_waits",
        [](std::uintptr_t address, std::uint32_t index) {
            checked(address, index).end_waits(index);
        },
        py::arg("address"), py::arg("index"));
    module.def(
        "pad_expected",
        [](std::uintptr_t address, std::uint32_t index) {
            return checked(address, index).expected(index).value;
        },
        py::arg("address"), py::arg("index"));
    module.def(
        "pad_move_on",
        [](std::uintptr_t address, std::uint32_t index, std::uint64_t amount) {
            checked(address, index).expected(index).move_on(amount);
        },
        py::arg("address"), py::arg("index"), py::arg("amount"));
    module.def(
        "pad_wait",
        [](std::uintptr_t address, std::uint32_t index, std::uint64_t wanted, double timeout_s,
           const Diagnosis& who) {
            const SignalPad pad = checked(address, index);
            const auto limit = static_cast<std::uint64_t>(timeout_s * 1e9);
            const py::gil_scoped_release released;
            return pad.wait(index, wanted, monotonic_ns() + limit, who);
        },
        py::arg("address"), py::arg("index"), py::arg("wanted"), py::arg("timeout_s"),
        py::arg("who") = Diagnosis{});
    module.def(
        "pad_abort",
        [](std::uintptr_t address, AbortCode code, const Diagnosis& who) {
            return checked(address).abort(code, who);
        },
        py::arg("address"), py::arg("code"), py::arg("who") = Diagnosis{});
    module.def(
        "pad_aborted",
        [](std::uintptr_t address) { return checked(address).aborted() != AbortCode::none; },
        py::arg("address"));
    module.def(
        "pad_record",
        [](std::uintptr_t address) {
            return reinterpret_cast<std::uintptr_t>(&checked(address).abort_record());
        },
        py::arg("address"));
    module.def(
        "record_outcome",
        [](std::uintptr_t address) -> py::object {
            const auto& record = *reinterpret_cast<const AbortRecord*>(address);
            const AbortCode code = abort_code(record);
            if (code == AbortCode::none) return py::none();
            return py::make_tuple(code, record.diagnosis);
        },
        py::arg("address"));
    module.def(
        "record_failure",
        [](std::uintptr_t address, AbortCode code, const Diagnosis& who) {
            return claim_abort(*reinterpret_cast<AbortRecord*>(address), code, who);
        },
        py::arg("address"), py::arg("code"), py::arg("who"));
    module.attr("RECORD_BYTES") = sizeof(AbortRecord);
    bind_fifo(module);
}
