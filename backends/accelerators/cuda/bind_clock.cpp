// A device's clock, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "backends/accelerators/cuda/bind_clock.hpp"
#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/device_clock.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {

void bind_clock(py::module_& module) {
    py::class_<DeviceClock>(module, "DeviceClock")
        .def(py::init<int>(), "device"_a)
        .def(
            "read",
            [](DeviceClock& clock, int samples, double timeout_s, std::uint64_t stream) {
                std::vector<ClockSample> found;
                {
                    const py::gil_scoped_release released;
                    found = clock.read(samples, timeout_s, stream_at(stream));
                }
                std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> told;
                for (const ClockSample& each : found) {
                    told.emplace_back(each.before_ns, each.device_ns, each.after_ns);
                }
                return told;
            },
            "samples"_a, "timeout_s"_a, py::kw_only(), "stream"_a)
        .def(
            "hold",
            [](DeviceClock& clock, std::int64_t until_ns, double most_s, std::uint64_t stream) {
                clock.hold(until_ns, most_s, stream_at(stream));
            },
            "until_ns"_a, "most_s"_a, py::kw_only(), "stream"_a)
        .def_property_readonly("passed", &DeviceClock::passed);
}

}  // namespace mkernel::cuda
