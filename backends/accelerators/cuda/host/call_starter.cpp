#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/require.hpp"

#include <stdexcept>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace py = pybind11;

namespace mkernel::cuda {

namespace {

struct Handed {
    MkernelCallStarter table;
    std::unique_ptr<CallStarter> starter;
};

// Sets the Python exception that the same error would have been if Python had made the call.
MkernelCallResult start(void* self, const MkernelCall* call) {
    try {
        return static_cast<CallStarter*>(self)->start(*call);
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const cuda::CudaError& error) {
        PyObject* const module = PyImport_ImportModule("mkernel.backends.accelerators.cuda._cuda");
        PyObject* const type =
            module == nullptr ? nullptr : PyObject_GetAttrString(module, "CudaError");
        if (type != nullptr) PyErr_SetString(type, error.what());
        Py_XDECREF(type);
        Py_XDECREF(module);
    } catch (const std::logic_error& error) {  // invalid_argument, length_error
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return MKERNEL_CALL_RAISED;
}

void destroy(PyObject* capsule) {
    delete static_cast<Handed*>(PyCapsule_GetPointer(capsule, MKERNEL_CALL_STARTER));
}

}  // namespace

CallStarter::CallStarter(int device, py::object order)
    : device_(device), kept_order_(std::move(order)), order_(kept_order_.cast<CallOrder&>()) {}

MkernelCallResult CallStarter::start(const MkernelCall& call) {
    const cuda::DeviceScope scope(device_);
    order_.begin(call.stream);
    try {
        queue(call);
    } catch (...) {
        order_.end(call.stream);
        throw;
    }
    order_.end(call.stream);
    return MKERNEL_CALL_QUEUED;
}

py::object CallStarter::capsule(std::unique_ptr<CallStarter> starter) {
    auto handed = std::make_unique<Handed>();
    handed->table = {&cuda::start, starter.get(), kAlignment};
    handed->starter = std::move(starter);
    PyObject* const made = PyCapsule_New(&handed->table, MKERNEL_CALL_STARTER, &destroy);
    if (made == nullptr) throw py::error_already_set();
    handed.release();
    return py::reinterpret_steal<py::object>(made);
}

void CallStarter::prefetch_in(const py::capsule& starter, std::uint32_t nbytes) {
    auto* const handed =
        static_cast<Handed*>(PyCapsule_GetPointer(starter.ptr(), MKERNEL_CALL_STARTER));
    if (handed == nullptr) throw py::error_already_set();
    handed->starter->prefetched_bytes_ = nbytes;
}

}  // namespace mkernel::cuda
