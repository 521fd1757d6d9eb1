// The view of torch that a call needs, queried through Python's C interface: nothing here links torch.
#pragma once

#include <Python.h>

#include <cstdint>

#include "backends/runtime/known/exchange.hpp"
#include "backends/runtime/known/reference.hpp"
#include "backends/runtime/known/signature.hpp"

namespace mkernel::known {

// Yes, no, or a Python exception is set.
enum class Answer { no, yes, raised };

// torch's functions, as `torch_view.py` finds them. One view a process would be enough; each KnownCalls has
// its own.
class TorchView {
  public:
    // Takes them from a dict of that module. Returns false with a Python exception.
    bool open(PyObject* functions);

    // Returns yes where torch just computes: no mode, transform, trace or forward-mode derivative is active.
    [[nodiscard]] Answer quiet() const;
    // Returns yes where operations on tensors that require grad are recorded.
    [[nodiscard]] Answer records() const { return is_true(is_grad_enabled_); }
    // Returns yes where `device` is the calling thread's current one, if torch has one of this type.
    [[nodiscard]] Answer is_current(const DlDevice& device) const;

    // Reads a tensor's signature. Returns `no` where a kernel needs more of it than its address, or its shape
    // is not of the kind that is remembered. `recorded`: the result of `records`.
    Answer read(PyObject* tensor, bool recorded, TensorSignature& signature, std::uint64_t& address,
                std::uint64_t& nbytes) const;
    // Gets torch's current stream of the device. Returns false with a Python exception.
    bool current_stream(const TensorSignature& tensor, std::uint64_t& stream) const;
    // Returns yes where the device's current stream is being captured into a graph.
    [[nodiscard]] Answer capturing() const;
    // Returns yes where torch's stream object is this stream of that device.
    Answer is_stream(PyObject* object, const TensorSignature& tensor, std::uint64_t stream) const;
    // Reports to autograd that a tensor was written to. Returns false with a Python exception.
    bool written(PyObject* tensor) const;

  private:
    [[nodiscard]] static Answer is_true(const Reference& function);

    const DlExchange* exchange_ = nullptr;
    Reference capsule_;
    Reference tensor_, parameter_;  // types
    Reference quiet_;               // ((function, what it returns then), ...)
    Reference forward_ad_, level_;  // a module's dict, and the name of the level in it
    Reference is_grad_enabled_, is_neg_, increment_version_;
    Reference current_device_, capturing_;             // None where there is none
    Reference requires_grad_, stream_, device_index_;  // names of attributes
};

}  // namespace mkernel::known
