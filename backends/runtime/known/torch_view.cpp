#include "backends/runtime/known/torch_view.hpp"

#include <cstring>

namespace mkernel::known {

namespace {

// The level of forward-mode derivatives while there are none.
constexpr long kNoLevel = -1;

Reference call(PyObject* function, PyObject* argument = nullptr) {
    PyObject* const arguments[] = {argument};
    return Reference::owned(
        PyObject_Vectorcall(function, arguments, argument == nullptr ? 0 : 1, nullptr));
}

// A single number has no dimension and no strides.
bool dense(const DlTensor& tensor) {
    return tensor.ndim >= 0 && tensor.ndim <= kMostDims &&
           (tensor.ndim == 0 || tensor.strides != nullptr) && tensor.data != nullptr;
}

}  // namespace

bool TorchView::open(PyObject* functions) {
    const auto found = [&](const char* name, Reference& into) {
        into = Reference::shared(PyDict_GetItemString(functions, name));
        if (!into) PyErr_Format(PyExc_KeyError, "functions[%s]", name);
        return static_cast<bool>(into);
    };
    if (!found("exchange", capsule_) || !found("tensor", tensor_) ||
        !found("parameter", parameter_) || !found("quiet", quiet_) ||
        !found("forward_ad", forward_ad_) || !found("level", level_) ||
        !found("is_grad_enabled", is_grad_enabled_) || !found("is_neg", is_neg_) ||
        !found("increment_version", increment_version_) ||
        !found("current_device", current_device_) || !found("capturing", capturing_) ||
        !found("stream", stream_)) {
        return false;
    }
    exchange_ = exchange_of(capsule_.get());
    if (exchange_ == nullptr) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "torch's exchange table is not of DLPack 1, or reads no tensors");
        return false;
    }
    if (!PyTuple_Check(quiet_.get()) || !PyDict_Check(forward_ad_.get())) {
        PyErr_SetString(PyExc_TypeError, "functions: `quiet` is no tuple, or `forward_ad` no dict");
        return false;
    }
    requires_grad_ = Reference::owned(PyUnicode_InternFromString("requires_grad"));
    device_index_ = Reference::owned(PyUnicode_InternFromString("device_index"));
    return requires_grad_ && device_index_;
}

Answer TorchView::is_true(const Reference& function) {
    const Reference found = call(function.get());
    if (!found) return Answer::raised;
    return found.get() == Py_True ? Answer::yes : Answer::no;
}

Answer TorchView::quiet() const {
    const Py_ssize_t count = PyTuple_GET_SIZE(quiet_.get());
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* const pair = PyTuple_GET_ITEM(quiet_.get(), i);
        const Reference found = call(PyTuple_GET_ITEM(pair, 0));
        if (!found) return Answer::raised;
        // Small integers, booleans and None are single objects.
        if (found.get() != PyTuple_GET_ITEM(pair, 1)) return Answer::no;
    }
    PyObject* const level = PyDict_GetItemWithError(forward_ad_.get(), level_.get());
    if (level == nullptr) return PyErr_Occurred() ? Answer::raised : Answer::no;
    const long depth = PyLong_AsLong(level);
    if (depth == kNoLevel && PyErr_Occurred()) return Answer::raised;
    return depth == kNoLevel ? Answer::yes : Answer::no;
}

Answer TorchView::is_current(const DlDevice& device) const {
    if (current_device_.get() == Py_None) return Answer::yes;
    const Reference found = call(current_device_.get());
    if (!found) return Answer::raised;
    const long index = PyLong_AsLong(found.get());
    if (index == -1 && PyErr_Occurred()) return Answer::raised;
    return index == device.index ? Answer::yes : Answer::no;
}

Answer TorchView::read(PyObject* tensor, bool recorded, TensorSignature& signature,
                       std::uint64_t& address, std::uint64_t& nbytes) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != tensor_.get() && type != parameter_.get()) return Answer::no;
    if (recorded) {
        const Reference requires_grad =
            Reference::owned(PyObject_GetAttr(tensor, requires_grad_.get()));
        if (!requires_grad) return Answer::raised;
        if (requires_grad.get() != Py_False) return Answer::no;
    }
    const Reference negated = call(is_neg_.get(), tensor);
    if (!negated) return Answer::raised;
    if (negated.get() != Py_False) return Answer::no;
    DlTensor view{};
    if (exchange_->read(tensor, &view) != 0) {  // without a storage of its own, say
        PyErr_Clear();
        return Answer::no;
    }
    if (!dense(view)) return Answer::no;
    std::uint64_t last = 0;  // element
    for (int i = 0; i < view.ndim; ++i) {
        if (view.shape[i] < 1 || view.strides[i] < 0) return Answer::no;
        signature.shape[i] = view.shape[i];
        signature.strides[i] = view.strides[i];
        last += static_cast<std::uint64_t>(view.shape[i] - 1) * view.strides[i];
    }
    signature.ndim = view.ndim;
    std::memcpy(&signature.dtype, &view.dtype, sizeof(view.dtype));
    signature.device_type = view.device.type;
    signature.device = view.device.index;
    address = reinterpret_cast<std::uint64_t>(view.data) + view.byte_offset;
    nbytes = (last + 1) * ((view.dtype.bits * view.dtype.lanes + 7) / 8);
    return Answer::yes;
}

bool TorchView::current_stream(const TensorSignature& tensor, std::uint64_t& stream) const {
    stream = 0;
    if (tensor.device_type == kDlCpu) return true;
    void* found = nullptr;
    if (exchange_->current_stream(tensor.device_type, tensor.device, &found) != 0) return false;
    stream = reinterpret_cast<std::uint64_t>(found);
    return true;
}

Answer TorchView::capturing() const {
    return capturing_.get() == Py_None ? Answer::no : is_true(capturing_);
}

Answer TorchView::is_stream(PyObject* object, const TensorSignature& tensor,
                            std::uint64_t stream) const {
    if (tensor.device_type == kDlCpu) return Answer::yes;  // it has one
    const Reference address = Reference::owned(PyObject_GetAttr(object, stream_.get()));
    const Reference device = Reference::owned(PyObject_GetAttr(object, device_index_.get()));
    if (!address || !device) {  // a torch whose streams have other names for them
        PyErr_Clear();
        return Answer::no;
    }
    const std::uint64_t found = PyLong_AsUnsignedLongLong(address.get());
    const long index = PyLong_AsLong(device.get());
    if (PyErr_Occurred()) return Answer::raised;
    return found == stream && index == tensor.device ? Answer::yes : Answer::no;
}

bool TorchView::written(PyObject* tensor) const {
    return static_cast<bool>(call(increment_version_.get(), tensor));
}

}  // namespace mkernel::known
