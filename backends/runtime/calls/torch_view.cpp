#include "backends/runtime/calls/torch_view.hpp"

#include <cstring>

namespace mkernel::calls {

namespace {

// The level of forward-mode derivatives while there are none.
constexpr long kNoLevel = -1;
// A device that is no CPU, where its type in DLPack's numbers is not known.
constexpr std::int32_t kDlOther = -1;

Reference call(PyObject* function, PyObject* argument = nullptr) {
    PyObject* const arguments[] = {argument};
    return Reference::owned(
        PyObject_Vectorcall(function, arguments, argument == nullptr ? 0 : 1, nullptr));
}

Reference attribute(PyObject* object, const Reference& name) {
    return Reference::owned(PyObject_GetAttr(object, name.get()));
}

Reference method(PyObject* object, const Reference& name) {
    PyObject* const arguments[] = {object};
    return Reference::owned(PyObject_VectorcallMethod(name.get(), arguments, 1, nullptr));
}

Reference interned(const char* text) {
    return Reference::owned(PyUnicode_InternFromString(text));
}

// Adds sizes and strides, and returns how many bytes lie between the first element and the end of the last; 0
// where the tensor is empty or walks backwards.
std::uint64_t lay_out(int ndim, const std::int64_t* shape, const std::int64_t* strides,
                      std::uint64_t element_bytes, bool any_rows, Signature& signature) {
    std::uint64_t last = 0;  // element
    signature.add(static_cast<std::uint64_t>(ndim));
    for (int i = 0; i < ndim; ++i) {
        if (shape[i] < 1 || strides[i] < 0) return 0;
        signature.add(static_cast<std::uint64_t>(any_rows && i == 0 ? 0 : shape[i]));
        signature.add(static_cast<std::uint64_t>(strides[i]));
        last += static_cast<std::uint64_t>(shape[i] - 1) * strides[i];
    }
    return (last + 1) * element_bytes;
}

}  // namespace

bool TorchView::open(PyObject* functions) {
    const auto found = [&](const char* name, Reference& into) {
        into = Reference::shared(PyDict_GetItemString(functions, name));
        if (!into) PyErr_Format(PyExc_KeyError, "functions[%s]", name);
        return static_cast<bool>(into);
    };
    if (!found("exchange", capsule_) || !found("tensor", tensor_) ||
        !found("parameter", parameter_) || !found("dtype", dtype_type_) ||
        !found("quiet", quiet_) || !found("forward_ad", forward_ad_) || !found("level", level_) ||
        !found("is_grad_enabled", is_grad_enabled_) || !found("is_neg", is_neg_) ||
        !found("increment_version", increment_version_) ||
        !found("current_device", current_device_) || !found("capturing", capturing_) ||
        !found("raw_stream", raw_stream_) || !found("stream", stream_)) {
        return false;
    }
    if (capsule_.get() != Py_None) exchange_ = exchange_of(capsule_.get());
    if (!PyTuple_Check(quiet_.get()) || !PyDict_Check(forward_ad_.get())) {
        PyErr_SetString(PyExc_TypeError, "functions: `quiet` is no tuple, or `forward_ad` no dict");
        return false;
    }
    requires_grad_ = interned("requires_grad");
    device_index_ = interned("device_index");
    shape_ = interned("shape");
    stride_ = interned("stride");
    dtype_ = interned("dtype");
    device_ = interned("device");
    data_ptr_ = interned("data_ptr");
    element_size_ = interned("element_size");
    type_ = interned("type");
    index_ = interned("index");
    return PyErr_Occurred() == nullptr;
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

Answer TorchView::requires_grad(PyObject* tensor) const {
    const Reference found = attribute(tensor, requires_grad_);
    if (!found) return Answer::raised;
    return found.get() == Py_True ? Answer::yes : Answer::no;
}

Answer TorchView::read(PyObject* tensor, bool any_rows, Signature& signature,
                       TensorView& view) const {
    const Reference negated = call(is_neg_.get(), tensor);
    if (!negated) return Answer::raised;
    if (negated.get() != Py_False) return Answer::no;
    if (exchange_ == nullptr) return read_attributes(tensor, any_rows, signature, view);
    DlTensor found{};
    if (exchange_->read(tensor, &found) != 0) {  // without a storage of its own, say
        PyErr_Clear();
        return Answer::no;
    }
    if (found.data == nullptr || (found.ndim > 0 && found.strides == nullptr)) return Answer::no;
    std::uint32_t dtype = 0;
    static_assert(sizeof(found.dtype) == sizeof(dtype));
    std::memcpy(&dtype, &found.dtype, sizeof(dtype));
    signature.add(std::uint64_t{dtype});
    signature.add(static_cast<std::uint64_t>(found.device.type) << 32 | found.device.index);
    view.device = found.device;
    view.address = reinterpret_cast<std::uint64_t>(found.data) + found.byte_offset;
    const std::uint64_t element = (found.dtype.bits * found.dtype.lanes + 7) / 8;
    view.nbytes = lay_out(found.ndim, found.shape, found.strides, element, any_rows, signature);
    return view.nbytes > 0 ? Answer::yes : Answer::no;
}

Answer TorchView::read_attributes(PyObject* tensor, bool any_rows, Signature& signature,
                                  TensorView& view) const {
    const Reference shape = attribute(tensor, shape_), stride = method(tensor, stride_);
    const Reference dtype = attribute(tensor, dtype_), device = attribute(tensor, device_);
    const Reference element = method(tensor, element_size_), address = method(tensor, data_ptr_);
    if (!shape || !stride || !dtype || !device || !element || !address) {  // it has no storage
        PyErr_Clear();
        return Answer::no;
    }
    const Reference type = attribute(device.get(), type_), index = attribute(device.get(), index_);
    if (!type || !index) return Answer::raised;
    view.device = {
        PyUnicode_CompareWithASCIIString(type.get(), "cpu") == 0 ? kDlCpu : kDlOther,
        index.get() == Py_None ? 0 : static_cast<std::int32_t>(PyLong_AsLong(index.get()))};
    signature.add(dtype.get());
    signature.add(static_cast<std::uint64_t>(view.device.type) << 32 | view.device.index);
    std::vector<std::int64_t> sizes, strides;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.get()); ++i) {
        sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.get(), i)));
        strides.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(stride.get(), i)));
    }
    view.address = PyLong_AsUnsignedLongLong(address.get());
    view.nbytes = lay_out(static_cast<int>(sizes.size()), sizes.data(), strides.data(),
                          PyLong_AsUnsignedLongLong(element.get()), any_rows, signature);
    if (PyErr_Occurred()) return Answer::raised;
    return view.address != 0 && view.nbytes > 0 ? Answer::yes : Answer::no;
}

bool TorchView::locate(PyObject* tensor, std::uint64_t& address) const {
    if (exchange_ == nullptr) {
        const Reference found = method(tensor, data_ptr_);
        if (found) address = PyLong_AsUnsignedLongLong(found.get());
        return !PyErr_Occurred();
    }
    DlTensor found{};
    if (exchange_->read(tensor, &found) != 0) return false;
    address = reinterpret_cast<std::uint64_t>(found.data) + found.byte_offset;
    return true;
}

bool TorchView::current_stream(const DlDevice& device, std::uint64_t& stream) const {
    stream = 0;
    if (device.type == kDlCpu) return true;
    if (exchange_ == nullptr) {
        if (raw_stream_.get() == Py_None) return true;
        const Reference index = Reference::owned(PyLong_FromLong(device.index));
        const Reference found = index ? call(raw_stream_.get(), index.get()) : Reference();
        if (found) stream = PyLong_AsUnsignedLongLong(found.get());
        return !PyErr_Occurred();
    }
    void* found = nullptr;
    if (exchange_->current_stream(device.type, device.index, &found) != 0) return false;
    stream = reinterpret_cast<std::uint64_t>(found);
    return true;
}

Answer TorchView::capturing() const {
    return capturing_.get() == Py_None ? Answer::no : is_true(capturing_);
}

Answer TorchView::is_stream(PyObject* object, const DlDevice& own, std::uint64_t stream) const {
    if (own.type == kDlCpu) return Answer::yes;  // it has one
    const Reference address = Reference::owned(PyObject_GetAttr(object, stream_.get()));
    const Reference device = Reference::owned(PyObject_GetAttr(object, device_index_.get()));
    if (!address || !device) {  // a torch whose streams have other names for them
        PyErr_Clear();
        return Answer::no;
    }
    const std::uint64_t found = PyLong_AsUnsignedLongLong(address.get());
    const long index = PyLong_AsLong(device.get());
    if (PyErr_Occurred()) return Answer::raised;
    return found == stream && index == own.index ? Answer::yes : Answer::no;
}

bool TorchView::written(PyObject* tensors) const {
    return static_cast<bool>(call(increment_version_.get(), tensors));
}

}  // namespace mkernel::calls
