// The view of torch that a call needs, queried through Python's C interface: nothing here links torch.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "backends/runtime/calls/exchange.hpp"
#include "backends/runtime/calls/reference.hpp"
#include "backends/runtime/calls/signature.hpp"

namespace mkernel::calls {

// Yes, no, or a Python exception is set.
enum class Answer { no, yes, raised };

// A tensor that a kernel may use by its address alone.
struct TensorView {
    std::uint64_t address = 0;
    std::uint64_t nbytes = 0;  // from its first element to its last
    DlDevice device{};
};

// torch's functions, as `torch_state.py` finds them.
class TorchView {
  public:
    // Takes them from a dict of that module. Returns false with a Python exception.
    bool open(PyObject* functions);

    // Returns yes where torch just computes: no mode, transform, trace or forward-mode derivative is active.
    [[nodiscard]] Answer quiet() const;
    // Returns yes where operations on tensors that require grad are recorded.
    [[nodiscard]] Answer records() const { return is_true(is_grad_enabled_); }
    // Returns yes where the tensor requires grad.
    [[nodiscard]] Answer requires_grad(PyObject* tensor) const;
    // Returns yes where `device` is the calling thread's current one, if torch has one of this type.
    [[nodiscard]] Answer is_current(const DlDevice& device) const;
    [[nodiscard]] bool is_dtype(PyObject* object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object)) == dtype_type_.get();
    }
    // Returns yes for a tensor whose type is torch's own.
    [[nodiscard]] bool is_plain(PyObject* object) const {
        PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
        return type == tensor_.get() || type == parameter_.get();
    }

    // Reads a tensor, and adds its shape (but for its first size, with `any_rows`), strides, dtype and device to
    // `signature`. Returns `no` where a kernel needs more of it than its address.
    Answer read(PyObject* tensor, bool any_rows, Signature& signature, TensorView& view) const;
    // Reads where a plain tensor lies. Returns false with a Python exception.
    bool locate(PyObject* tensor, std::uint64_t& address) const;
    // Gets torch's current stream of the device. Returns false with a Python exception.
    bool current_stream(const DlDevice& device, std::uint64_t& stream) const;
    // Returns yes where the device's current stream is being captured into a graph.
    [[nodiscard]] Answer capturing() const;
    // Returns yes where torch's stream object is this stream of that device.
    Answer is_stream(PyObject* object, const DlDevice& device, std::uint64_t stream) const;
    // Reports to autograd that tensors were written to. Returns false with a Python exception.
    bool written(PyObject* tensors) const;

  private:
    [[nodiscard]] static Answer is_true(const Reference& function);
    // Reads the same by attributes of the tensor, for a torch without an exchange table.
    Answer read_attributes(PyObject* tensor, bool any_rows, Signature& signature,
                           TensorView& view) const;

    const DlExchange* exchange_ = nullptr;  // null: this torch has none
    Reference capsule_;
    Reference tensor_, parameter_, dtype_type_;  // types
    Reference quiet_;                            // ((function, what it returns then), ...)
    Reference forward_ad_, level_;               // a module's dict, and the name of the level in it
    Reference is_grad_enabled_, is_neg_, increment_version_;
    Reference current_device_, capturing_, raw_stream_;  // None where there is none
    Reference requires_grad_, stream_, device_index_;    // names of attributes
    Reference shape_, stride_, dtype_, device_, data_ptr_, element_size_, type_,
        index_;  // likewise
};

}  // namespace mkernel::calls
