// An owned reference to a Python object, or none.
#pragma once

#include <Python.h>

#include <utility>

namespace mkernel::calls {

class Reference {
  public:
    Reference() = default;
    // Takes over a new reference, as Python's functions return it.
    static Reference owned(PyObject* object) { return Reference(object); }
    static Reference shared(PyObject* object) {
        Py_XINCREF(object);
        return Reference(object);
    }
    Reference(const Reference& other) : object_(other.object_) { Py_XINCREF(object_); }
    Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Reference& operator=(Reference other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Reference() { Py_XDECREF(object_); }

    [[nodiscard]] PyObject* get() const { return object_; }
    [[nodiscard]] PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    explicit Reference(PyObject* object) : object_(object) {}

    PyObject* object_ = nullptr;
};

}  // namespace mkernel::calls
