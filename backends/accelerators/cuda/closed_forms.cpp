// The Python module `_closed_forms`: times of copies and of calls in parts, for the planner.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <tuple>

#include "backends/accelerators/cuda/closed_forms.hpp"

namespace py = pybind11;
using namespace py::literals;
using namespace mkernel::hopper;

namespace {

// A number of bytes: what sizes of 31 bits multiply to may not fit 64.
Wide wide(const py::int_& value) {
    int overflow = 0;
    const long long low = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow == 0) return low;
    const auto half = [](const py::object& part) { return Wide{part.cast<Size>()}; };
    return (half(value >> py::int_(60)) << 60) + half(value & py::int_((1LL << 60) - 1));
}

using CurveFields = std::tuple<bool, Size, std::vector<std::pair<Size, double>>>;

Copies made(const std::vector<CurveFields>& curves, std::optional<double> most_gbs,
            std::optional<double> keeps_processors) {
    Copies copies{{}, most_gbs, keeps_processors};
    for (const auto& fields : curves) {
        copies.curves.push_back(std::make_from_tuple<Curve>(fields));
        if (copies.curves.back().points.size() < 2) throw std::invalid_argument("one point");
    }
    return copies;
}

Parts parts_of(double gap_us, double sum_us, double sum_gbs, double sum_cached_gbs,
               Size sum_cached_bytes, double end_us, const Copies& put) {
    if (!put.choose(1, 0, true)) throw std::invalid_argument("no copy engine puts");
    return {gap_us, sum_us, sum_gbs, sum_cached_gbs, sum_cached_bytes, end_us, put};
}

std::tuple<double, double, double> fields(const Times& times) {
    return {times.compute, times.comm, times.pipelined};
}

}  // namespace

PYBIND11_MODULE(_closed_forms, m) {
    m.doc() = "Closed forms of copies and of calls in parts (hopper/closed_forms.hpp).";
    py::class_<Copies>(m, "Copies")
        .def(py::init(&made), "curves"_a, "most_gbs"_a, "keeps_processors"_a)
        .def(
            "microseconds",
            [](const Copies& self, std::size_t curve, const py::int_& nbytes) {
                return self.microseconds(self.curves.at(curve), wide(nbytes));
            },
            "curve"_a, "nbytes"_a)
        .def(
            "choose",
            [](const Copies& self, const py::int_& nbytes, Size most_blocks, bool flagged) {
                std::optional<std::pair<std::size_t, double>> found;
                if (const auto choice = self.choose(wide(nbytes), most_blocks, flagged)) {
                    found.emplace(choice->curve, choice->microseconds);
                }
                return found;
            },
            "nbytes"_a, "most_blocks"_a, "flagged"_a);
    py::class_<Parts>(m, "Parts")
        .def(py::init(&parts_of), "gap_us"_a, "sum_us"_a, "sum_gbs"_a, "sum_cached_gbs"_a,
             "sum_cached_bytes"_a, "end_us"_a, "put"_a)
        .def(
            "gathered",
            [](const Parts& self, Size world, Size m, Size k, Size itemsize, Size parts,
               double own_us, double part_us, bool scaled) {
                return fields(self.gathered(world, m, k, itemsize, parts, own_us, part_us, scaled));
            },
            "world"_a, "m"_a, "k"_a, "itemsize"_a, "parts"_a, "own_us"_a, "part_us"_a, "scaled"_a)
        .def(
            "summed",
            [](const Parts& self, bool whole, Size world, Size m, Size n, Size parts, Size of_sums,
               Size of_out, double part_us) {
                return fields(self.summed(whole, world, m, n, parts, of_sums, of_out, part_us));
            },
            "whole"_a, "world"_a, "m"_a, "n"_a, "parts"_a, "of_sums"_a, "of_out"_a, "part_us"_a);
}
