// A library's product as native code starts it, with tensors that Python made.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "backends/accelerators/cuda/host/call_starter.hpp"

namespace mkernel::cuda {

// Returns a tensor of a call; borrowed.
inline pybind11::handle tensor_of(const MkernelCall& call, int which) {
    return static_cast<PyObject*>(call.tensors[which]);
}

// The making of a tensor: a function of torch's and its arguments.
struct Allocation {
    pybind11::object function;
    pybind11::tuple arguments;

    [[nodiscard]] pybind11::object operator()() const;
};

// Returns the allocation of a pair (function, arguments), or of None. py::value_error.
std::optional<Allocation> allocation(const pybind11::object& pair);

// Returns a tensor's address in memory.
std::uint64_t address_of(const pybind11::object& tensor);

// The product `out` = rows @ the call's b, perhaps with a bias, on torch's current stream, rounded once.
class LibraryProduct {
  public:
    LibraryProduct() = default;
    virtual ~LibraryProduct() = default;
    LibraryProduct(const LibraryProduct&) = delete;
    LibraryProduct& operator=(const LibraryProduct&) = delete;

    // `scales`: those of the rows; it and `bias` may be None.
    virtual void multiply(const MkernelCall& call, pybind11::handle rows, pybind11::handle scales,
                          pybind11::handle bias, pybind11::handle out) const = 0;

    // Returns true where a product of so many rows, without scales or a bias, takes addresses now; otherwise
    // it takes tensors.
    [[nodiscard]] virtual bool takes_addresses(std::int64_t /*rows*/) const { return false; }

    // Multiplies by the addresses of rows and of their results, where it takes them.
    virtual void multiply_at(const MkernelCall& /*call*/, std::uint64_t /*rows*/,
                             std::int64_t /*count*/, std::uint64_t /*out*/) const {
        throw std::logic_error("this product takes tensors");
    }

    // Returns memory for what a call has between its product and its exchange, which its world's next call
    // uses again; 0 where there is less room than that.
    [[nodiscard]] virtual std::uint64_t room(std::uint64_t /*bytes*/) const { return 0; }
};

}  // namespace mkernel::cuda
