// The Python module `_nics`: sessions and device lists as plain values; typed in _nics.pyi. Every function
// that can block or take long runs without the GIL. Native threads never call Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backends/nics/cx7/rc_nic.hpp"
#include "backends/nics/efa/srd_nic.hpp"
#include "backends/nics/session.hpp"
#include "backends/nics/verbs/devices.hpp"
#include "backends/nics/verbs/loader.hpp"

namespace py = pybind11;
namespace nics = mkernel::nics;
using Unlocked = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(_nics, m) {
    m.doc() = "NIC sessions, verbs providers and the signal pad helpers of mkernel";

    py::register_exception<nics::SetupError>(m, "SetupError", PyExc_RuntimeError);
    py::register_exception<nics::verbs::LoadError>(m, "LoadError", PyExc_OSError);

    py::class_<nics::verbs::DeviceInfo>(m, "DeviceInfo")
        .def_readonly("name", &nics::verbs::DeviceInfo::name)
        .def_readonly("sysfs", &nics::verbs::DeviceInfo::sysfs)
        .def_readonly("firmware", &nics::verbs::DeviceInfo::firmware)
        .def_readonly("vendor_id", &nics::verbs::DeviceInfo::vendor_id)
        .def_readonly("port", &nics::verbs::DeviceInfo::port)
        .def_readonly("active", &nics::verbs::DeviceInfo::active)
        .def_readonly("link_layer", &nics::verbs::DeviceInfo::link_layer)
        .def_readonly("speed_gbps", &nics::verbs::DeviceInfo::speed_gbps)
        .def_readonly("state", &nics::verbs::DeviceInfo::state)
        .def_readonly("mtu", &nics::verbs::DeviceInfo::mtu)
        .def_readonly("gid_index", &nics::verbs::DeviceInfo::gid_index)
        .def_readonly("gid", &nics::verbs::DeviceInfo::gid)
        .def_readonly("gid_type", &nics::verbs::DeviceInfo::gid_type)
        .def_readonly("dmabuf", &nics::verbs::DeviceInfo::dmabuf);

    py::class_<nics::Endpoint>(m, "Endpoint")
        .def(py::init([](std::uint32_t qp_num, std::uint32_t psn, std::uint32_t lid,
                         std::uint32_t mtu, std::string gid, bool ethernet, std::uint32_t rail,
                         std::uint32_t receives, std::uint64_t credit_address,
                         std::uint32_t credit_rkey) {
                 return nics::Endpoint{qp_num,         psn,        lid,  mtu,
                                       std::move(gid), ethernet,   rail, receives,
                                       credit_address, credit_rkey};
             }),
             py::kw_only(), py::arg("qp_num"), py::arg("psn"), py::arg("lid"), py::arg("mtu"),
             py::arg("gid"), py::arg("ethernet"), py::arg("rail"), py::arg("receives"),
             py::arg("credit_address"), py::arg("credit_rkey"))
        .def_readonly("qp_num", &nics::Endpoint::qp_num)
        .def_readonly("psn", &nics::Endpoint::psn)
        .def_readonly("lid", &nics::Endpoint::lid)
        .def_readonly("mtu", &nics::Endpoint::mtu)
        .def_readonly("gid", &nics::Endpoint::gid)
        .def_readonly("ethernet", &nics::Endpoint::ethernet)
        .def_readonly("rail", &nics::Endpoint::rail)
        .def_readonly("receives", &nics::Endpoint::receives)
        .def_readonly("credit_address", &nics::Endpoint::credit_address)
        .def_readonly("credit_rkey", &nics::Endpoint::credit_rkey);

    py::class_<nics::RemoteKey>(m, "RemoteKey")
        .def(py::init(
                 [](std::uint64_t address, std::uint64_t bytes, std::vector<std::uint32_t> rkeys) {
                     return nics::RemoteKey{address, bytes, std::move(rkeys)};
                 }),
             py::kw_only(), py::arg("address"), py::arg("bytes"), py::arg("rkeys"))
        .def_readonly("address", &nics::RemoteKey::address)
        .def_readonly("bytes", &nics::RemoteKey::bytes)
        .def_readonly("rkeys", &nics::RemoteKey::rkeys);

    py::class_<nics::Registrations>(m, "Registrations")
        .def_readonly("host", &nics::Registrations::host)
        .def_readonly("dmabuf", &nics::Registrations::dmabuf)
        .def_readonly("peermem", &nics::Registrations::peermem);

    py::class_<nics::Failure>(m, "Failure")
        .def_readonly("status", &nics::Failure::status)
        .def_readonly("qp", &nics::Failure::qp)
        .def_readonly("wr_id", &nics::Failure::wr_id)
        .def_readonly("vendor_err", &nics::Failure::vendor_err)
        .def_readonly("peer", &nics::Failure::peer)
        .def_readonly("message", &nics::Failure::message);

    py::class_<nics::Capabilities>(m, "Capabilities")
        .def_readonly("ordered", &nics::Capabilities::ordered)
        .def_readonly("dmabuf", &nics::Capabilities::dmabuf)
        .def_readonly("peermem", &nics::Capabilities::peermem)
        .def_readonly("max_signal", &nics::Capabilities::max_signal)
        .def_readonly("max_value", &nics::Capabilities::max_value);

    py::class_<nics::ProxyStatistics>(m, "Statistics")
        .def_readonly("puts", &nics::ProxyStatistics::puts)
        .def_readonly("put_bytes", &nics::ProxyStatistics::put_bytes)
        .def_readonly("signals_sent", &nics::ProxyStatistics::signals_sent)
        .def_readonly("signals_raised", &nics::ProxyStatistics::signals_raised)
        .def_readonly("queue_depth", &nics::ProxyStatistics::queue_depth)
        .def_readonly("stalls", &nics::ProxyStatistics::stalls);

    py::class_<nics::LaneCounts>(m, "LaneCounts")
        .def_readonly("peer", &nics::LaneCounts::peer)
        .def_readonly("lane", &nics::LaneCounts::lane)
        .def_readonly("rail", &nics::LaneCounts::rail)
        .def_readonly("messages", &nics::LaneCounts::messages)
        .def_readonly("bytes", &nics::LaneCounts::bytes);

    py::class_<nics::Session>(m, "Session")
        .def("capabilities", [](nics::Session& s) { return s.nic().capabilities(); })
        .def(
            "add_peer",
            [](nics::Session& s, std::uint32_t peer, const std::vector<std::uint32_t>& rails) {
                return s.nic().add_peer(peer, rails);
            },
            py::arg("peer"), py::arg("rails"), Unlocked())
        .def(
            "connect",
            [](nics::Session& s, std::uint32_t peer, const std::vector<nics::Endpoint>& remote) {
                s.nic().connect(peer, remote);
            },
            py::arg("peer"), py::arg("remote"), Unlocked())
        .def(
            "register",
            [](nics::Session& s, std::uint32_t region, std::uint64_t address, std::uint64_t bytes,
               bool device, int dmabuf, std::uint64_t offset, std::uintptr_t flush) {
                using mkernel::transport::DeviceFlush;
                return s.nic().register_memory(region,
                                               {address, bytes, device, dmabuf, offset,
                                                reinterpret_cast<const DeviceFlush*>(flush)});
            },
            py::arg("region"), py::arg("address"), py::arg("nbytes"), py::kw_only(),
            py::arg("device"), py::arg("dmabuf"), py::arg("offset"), py::arg("flush"), Unlocked())
        .def("deregister", &nics::Session::deregister, py::arg("region"), py::arg("timeout_s"),
             Unlocked())
        .def(
            "bind",
            [](nics::Session& s, std::uint32_t region, std::uint32_t peer,
               const nics::RemoteKey& key) { s.nic().bind(region, peer, key); },
            py::arg("region"), py::arg("peer"), py::arg("key"))
        .def("start", &nics::Session::start, py::arg("pad"), py::arg("cpus"), Unlocked())
        .def_property_readonly("fifo", &nics::Session::fifo)
        .def(
            "put",
            [](nics::Session& s, std::uint32_t peer, std::uint32_t region, std::uint64_t local,
               std::uint64_t remote, std::uint64_t bytes, std::uint32_t signal, std::uint32_t value,
               double timeout_s) {
                mkernel::transport::PutCommand command;
                command.local_offset = local;
                command.remote_offset = remote;
                command.bytes = bytes;
                command.peer = peer;
                command.region = region;
                command.signal = signal;
                command.value = value;
                return static_cast<int>(s.put(command, timeout_s));
            },
            py::arg("peer"), py::arg("region"), py::arg("local"), py::arg("remote"),
            py::arg("nbytes"), py::arg("signal"), py::arg("value"), py::arg("timeout_s"),
            Unlocked())
        .def("flush", &nics::Session::flush, py::arg("timeout_s"), Unlocked())
        .def("statistics", &nics::Session::statistics)
        .def("registrations", &nics::Session::registrations)
        .def("lanes", &nics::Session::lanes)
        .def("failure", &nics::Session::failure)
        .def("close", &nics::Session::close, Unlocked());

    m.def(
        "library_path",
        [](const std::string& library) {
            return nics::verbs::Verbs::load(library)->library().path();
        },
        py::arg("library"), Unlocked());

    m.def(
        "efa_capabilities",
        [](const std::string& library, const std::string& efa_library, const std::string& device) {
            const auto verbs = nics::verbs::Verbs::load(library);
            const nics::verbs::Efadv efa(*verbs, efa_library);
            const auto context = nics::verbs::open_device(verbs, device);
            return nics::efa::query(efa, context.get(), device).device_caps;
        },
        py::arg("library"), py::arg("efa_library"), py::arg("device"), Unlocked());
    m.attr("EFA_RDMA_WRITE") = nics::verbs::kEfaRdmaWrite;

    m.def(
        "set_mover",
        [](const std::string& library, std::uintptr_t mover) {
            using mkernel::transport::Mover;
            const nics::verbs::Library opened(library);
            const auto symbol = opened.find("mkernel_softverbs_set_mover");
            if (symbol.address == nullptr) return false;
            int (*set)(Mover*) = symbol;
            return set(reinterpret_cast<Mover*>(mover)) == 0;
        },
        py::arg("library"), py::arg("mover"), Unlocked());

    m.def(
        "devices",
        [](const std::string& library) {
            return nics::verbs::list_devices(*nics::verbs::Verbs::load(library));
        },
        py::arg("library"), Unlocked());

    py::class_<nics::verbs::PortName>(m, "PortName")
        .def(py::init([](std::string device, std::uint8_t port) {
                 return nics::verbs::PortName{std::move(device), port};
             }),
             py::arg("device"), py::arg("port"));

    py::class_<nics::verbs::Options>(m, "Options")
        .def(py::init<>())
        .def_readwrite("queue_depth", &nics::verbs::Options::queue_depth)
        .def_readwrite("receive_depth", &nics::verbs::Options::receive_depth)
        .def_readwrite("stripe_bytes", &nics::verbs::Options::stripe_bytes)
        .def_readwrite("rnr_retry", &nics::verbs::Options::rnr_retry)
        .def_readwrite("traffic_class", &nics::verbs::Options::traffic_class)
        .def_readwrite("service_level", &nics::verbs::Options::service_level)
        .def_readwrite("gid_index", &nics::verbs::Options::gid_index)
        .def_readwrite("peermem", &nics::verbs::Options::peermem)
        .def_readwrite("qp_timeout", &nics::verbs::Options::qp_timeout)
        .def_readwrite("retry_count", &nics::verbs::Options::retry_count);

    m.def(
        "open_cx7",
        [](const std::string& library, const std::vector<nics::verbs::PortName>& ports,
           const nics::verbs::Options& options, std::uint64_t fifo_slots) {
            return std::make_unique<nics::Session>(
                std::make_unique<nics::cx7::RcNic>(nics::verbs::Verbs::load(library), ports,
                                                   options),
                fifo_slots);
        },
        py::kw_only(), py::arg("library"), py::arg("ports"), py::arg("options"),
        py::arg("fifo_slots"), Unlocked());

    m.def(
        "open_efa",
        [](const std::string& library, const std::string& efa_library,
           const std::vector<nics::verbs::PortName>& ports, const nics::verbs::Options& options,
           std::uint64_t fifo_slots) {
            return std::make_unique<nics::Session>(
                std::make_unique<nics::efa::SrdNic>(nics::verbs::Verbs::load(library), efa_library,
                                                    ports, options),
                fifo_slots);
        },
        py::kw_only(), py::arg("library"), py::arg("efa_library"), py::arg("ports"),
        py::arg("options"), py::arg("fifo_slots"), Unlocked());
}
