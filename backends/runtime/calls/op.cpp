#include "backends/runtime/calls/op.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

namespace mkernel::calls {

namespace {

// What a signature says of an argument that is no tensor.
enum Kind : std::uint64_t { kNone, kTensor, kSequence, kInteger, kNumber, kText, kObject };

Reference tuple_of(const std::vector<PyObject*>& values) {
    Reference made = Reference::owned(PyTuple_New(values.size()));
    if (!made) return made;
    for (std::size_t i = 0; i < values.size(); ++i) {
        PyTuple_SET_ITEM(made.get(), i, Py_NewRef(values[i]));
    }
    return made;
}

// Adds a value that is no tensor. `no`: it is of a kind that is not compared.
Answer sign_value(PyObject* value, Signature& signature) {
    if (value == Py_None || PyBool_Check(value)) {  // single objects
        signature.add(kNone);
        signature.add(value);
    } else if (PyLong_CheckExact(value)) {
        signature.add(kInteger);
        signature.add(static_cast<std::uint64_t>(PyLong_AsLongLong(value)));
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return Answer::no;
        }
    } else if (PyFloat_CheckExact(value)) {
        const double number = PyFloat_AS_DOUBLE(value);
        std::uint64_t word = 0;
        static_assert(sizeof(word) == sizeof(number));
        std::memcpy(&word, &number, sizeof(word));
        signature.add(kNumber);
        signature.add(word);
    } else if (PyUnicode_CheckExact(value)) {
        Py_ssize_t length = 0;
        const char* const text = PyUnicode_AsUTF8AndSize(value, &length);
        if (text == nullptr) return Answer::raised;
        signature.add(kText);
        signature.add(static_cast<std::uint64_t>(length));
        for (Py_ssize_t at = 0; at < length; at += 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, text + at, std::min<Py_ssize_t>(8, length - at));
            signature.add(word);
        }
    } else {
        return Answer::no;
    }
    return Answer::yes;
}

}  // namespace

bool Op::bind(PyObject* const* arguments, std::size_t count, PyObject* names,
              std::vector<PyObject*>& values) const {
    const std::size_t all = PyTuple_GET_SIZE(parameters.get());
    const std::size_t required = all - PyTuple_GET_SIZE(defaults.get());
    values.assign(all, nullptr);
    if (count > all) {
        PyErr_Format(PyExc_TypeError, "%U takes %zu arguments, not %zu", name.get(), all, count);
        return false;
    }
    for (std::size_t i = 0; i < count; ++i) values[i] = arguments[i];
    const std::size_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (std::size_t each = 0; each < named; ++each) {
        PyObject* const given = PyTuple_GET_ITEM(names, each);
        std::size_t at = 0;
        while (at < all && PyTuple_GET_ITEM(parameters.get(), at) != given) ++at;  // interned
        for (std::size_t i = 0; at == all && i < all; ++i) {
            if (PyUnicode_Compare(PyTuple_GET_ITEM(parameters.get(), i), given) == 0) {
                at = i;
                break;
            }
        }
        if (at == all || values[at] != nullptr) {
            PyErr_Format(PyExc_TypeError, "%U has no argument %U, or it is given twice", name.get(),
                         given);
            return false;
        }
        values[at] = arguments[count + each];
    }
    for (std::size_t i = 0; i < all; ++i) {
        if (values[i] != nullptr) continue;
        if (i < required) {
            PyErr_Format(PyExc_TypeError, "%U misses its argument %U", name.get(),
                         PyTuple_GET_ITEM(parameters.get(), i));
            return false;
        }
        values[i] = PyTuple_GET_ITEM(defaults.get(), i - required);
    }
    return true;
}

bool Op::is_profiled() const {
    static PyObject* const nvtx = PyUnicode_InternFromString("nvtx");
    static PyObject* const enabled = PyUnicode_InternFromString("_is_profiler_enabled");
    const bool heard = PyDict_GetItemWithError(profiling.get(), nvtx) != Py_None;
    return heard || PyDict_GetItemWithError(profiler.get(), enabled) == Py_True;
}

Answer Op::sign_tensor(const CallPath& path, PyObject* tensor, bool grad, bool rows,
                       Signature& signature, Slots& slots, bool& records) const {
    if (!path.torch.is_plain(tensor)) return Answer::no;
    if (grad) {
        const Answer requires_grad = path.torch.requires_grad(tensor);
        if (requires_grad == Answer::raised) return Answer::raised;
        records = records || requires_grad == Answer::yes;
    }
    signature.add(kTensor);
    TensorView view;
    const Answer read = path.torch.read(tensor, rows, signature, view);
    if (read != Answer::yes) return read;
    slots.objects.push_back(Reference::shared(tensor));
    slots.given.push_back(view);
    return path.place(view, signature);
}

Answer Op::sign(const CallPath& path, const std::vector<PyObject*>& values, std::uint64_t loose,
                Signature& signature, Slots& slots, bool& records) const {
    signature.add(name.get());
    signature.add(static_cast<std::uint64_t>(caller >= Caller::torch));
    const Answer grad = path.torch.records();
    if (grad == Answer::raised) return Answer::raised;
    const bool recorded = grad == Answer::yes;
    for (std::size_t i = 0; i < values.size(); ++i) {
        PyObject* const value = values[i];
        if (static_cast<int>(i) == group) continue;
        const bool rows = (loose >> i & 1) != 0;
        Answer answer = Answer::yes;
        if (path.torch.is_plain(value)) {
            answer = sign_tensor(path, value, recorded, rows, signature, slots, records);
        } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
            const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
            signature.add(kSequence);
            signature.add(static_cast<std::uint64_t>(count));
            for (Py_ssize_t each = 0; each < count && answer == Answer::yes; ++each) {
                PyObject* const one = PySequence_Fast_GET_ITEM(value, each);
                if (one == Py_None) {
                    answer = sign_value(one, signature);
                } else {
                    answer = sign_tensor(path, one, recorded, rows, signature, slots, records);
                }
            }
        } else {
            answer = sign_value(value, signature);
            if (answer == Answer::no && path.torch.is_dtype(value)) {  // they live as long as torch
                signature.add(kObject);
                signature.add(value);
                answer = Answer::yes;
            }
        }
        if (answer != Answer::yes) return answer;
    }
    if (slots.given.empty()) return Answer::no;
    slots.add_overlaps(signature);
    return path.torch.is_current(slots.given[0].device);
}

Reference Op::family_of(const CallPath& path, const std::vector<PyObject*>& values) const {
    Signature signature;
    Slots slots;
    bool records = false;
    if (family == 0) return Reference::shared(Py_None);
    const Answer signed_ = sign(path, values, any_rows | family, signature, slots, records);
    if (signed_ == Answer::raised) return Reference();
    if (signed_ == Answer::no) return Reference::shared(Py_None);
    const auto& words = signature.words();
    return Reference::owned(
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()),
                                  static_cast<Py_ssize_t>(words.size() * sizeof(words[0]))));
}

PyObject* Op::make(const std::vector<PyObject*>& values, const Signature* signature,
                   const CallPath* path) const {
    const Reference all = tuple_of(values);
    Reference told = Reference::shared(Py_None), like = Reference::shared(Py_None);
    if (signature != nullptr) {
        auto kept = std::make_unique<Signature>(*signature);
        told = Reference::owned(PyCapsule_New(kept.get(), kSignatureCapsule, [](PyObject* capsule) {
            delete static_cast<Signature*>(PyCapsule_GetPointer(capsule, kSignatureCapsule));
        }));
        if (told) kept.release();
        like = family_of(*path, values);
    }
    if (!all || !told || !like) return nullptr;
    return PyObject_CallFunctionObjArgs(python.get(), all.get(), told.get(), like.get(), nullptr);
}

PyObject* Op::call(PyObject* const* arguments, std::size_t count, PyObject* names) const {
    std::vector<PyObject*> values;
    const bool keys = caller == Caller::graph;
    if (!bind(arguments + keys, count - keys, names, values)) return nullptr;
    const auto by_python = [&](const Signature* signature, const CallPath* path = nullptr) {
        if (keys) return PyObject_Vectorcall(python.get(), arguments, count, names);
        return make(values, signature, path);
    };
    if (is_profiled()) {
        if (keys) return by_python(nullptr);
        const Reference all = tuple_of(values);
        if (!all) return nullptr;
        PyObject* const done = PyObject_CallFunctionObjArgs(named.get(), all.get(), nullptr);
        if (done != Py_NotImplemented) return done;  // else a range is open already
        Py_DECREF(done);
    }
    const Answer quiet = torch.quiet();
    if (quiet == Answer::raised) return nullptr;
    if (quiet == Answer::no) return by_python(nullptr);
    PyObject* const world = values[group];
    PyObject* const found = world == Py_None || PyUnicode_CheckExact(world)
                                ? PyDict_GetItemWithError(paths.get(), world)
                                : nullptr;
    if (found == nullptr) return PyErr_Occurred() ? nullptr : by_python(nullptr);
    const Reference kept = Reference::shared(found);
    CallPath* const path = path_of(found);
    Signature signature;
    Slots slots;
    bool records = false;
    const Answer signed_ = sign(*path, values, any_rows, signature, slots, records);
    if (signed_ == Answer::raised) return nullptr;
    if (signed_ == Answer::no) return by_python(nullptr);
    if (records) {
        if (!record) return by_python(nullptr);
        return PyObject_Vectorcall(record.get(), values.data(), values.size(), nullptr);
    }
    const std::shared_ptr<const KnownCall> known = path->find(signature);
    if (known == nullptr) return by_python(&signature, path);
    PyObject* const result = path->run(*known, slots);
    if (result != nullptr || PyErr_Occurred()) return result;
    return by_python(nullptr);
}

}  // namespace mkernel::calls
