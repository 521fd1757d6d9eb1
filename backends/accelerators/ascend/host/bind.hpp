// Helpers that the ops' bindings share: names and tensors in the form in which Python passes them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/host/ops.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"

// A dtype is a string in Python.
template <>
struct pybind11::detail::type_caster<mkernel::ascend::isa::DType> {
    using DType = mkernel::ascend::isa::DType;
    PYBIND11_TYPE_CASTER(DType, const_name("str"));

    bool load(handle source, bool) {
        const auto name = source.cast<std::string>();
        for (const auto dtype : {DType::float16, DType::bfloat16, DType::float32}) {
            if (name != name_of(dtype)) continue;
            value = dtype;
            return true;
        }
        throw value_error("dtype = " + name + "; expected float16, bfloat16 or float32");
    }
};

namespace mkernel::ascend {

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// A matrix's address, and its strides of rows and columns in elements. A record, whose tensors are never
// touched, takes the same with null addresses.
using Matrix = std::tuple<std::uint64_t, std::int64_t, std::int64_t>;

inline isa::GlobalView view(const Matrix& matrix, isa::DType dtype, std::uint32_t rows,
                            std::uint32_t cols) {
    return {pointer<std::byte>(std::get<0>(matrix)),
            dtype,
            rows,
            cols,
            std::get<1>(matrix),
            std::get<2>(matrix)};
}

// A member of a geometry, and its name in Python.
template <class Geometry, class Value>
struct Field {
    const char* name;
    Value Geometry::*member;
};

// Binds a geometry's constructor, from its members by keyword. Refuses geometries that the op's kernels
// cannot run.
template <class Geometry, class... Values>
void bind_init(pybind11::class_<Geometry> bound, Field<Geometry, Values>... fields) {
    const auto make = [fields...](Values... values) {
        Geometry made;
        ((made.*fields.member = values), ...);
        host::check(made);
        return made;
    };
    bound.def(pybind11::init(make), pybind11::kw_only(), pybind11::arg(fields.name)...);
}

// Binds a geometry's class, with the members that every op's geometry shows.
template <class Geometry>
pybind11::class_<Geometry> bind_geometry(pybind11::module_& module, const char* name) {
    using pybind11::arg;
    return pybind11::class_<Geometry>(module, name)
        .def_property_readonly("chunks", &Geometry::chunks)
        .def_property_readonly("inbox_bytes", &Geometry::inbox_bytes)
        .def_property_readonly("outbox_bytes", &Geometry::outbox_bytes)
        .def_property_readonly("scratch_bytes", &Geometry::scratch_bytes)
        .def_property_readonly("words", &Geometry::words)
        .def(
            "arrived",
            [](const Geometry& g, std::uint32_t source, std::uint32_t chunk, std::uint64_t epoch) {
                return word_of(g.arrived(source, chunk), epoch);
            },
            arg("source"), arg("chunk"), arg("epoch"));
}

// Bind each op's geometry and the factory of its kernels.
void bind_gemm(pybind11::module_& module);
void bind_moe(pybind11::module_& module);
void bind_ring_attention(pybind11::module_& module);

}  // namespace mkernel::ascend
