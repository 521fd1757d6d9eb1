// The Python module `_known_calls`. Written against Python's own interface: a call through pybind11 would
// cost as much as everything that a known call does here.
#include <Python.h>

#include <cstring>
#include <new>

#include "backends/runtime/known/known_calls.hpp"

using namespace mkernel::known;

namespace {

// The number of the interface between `known.py` and this module; another number belongs to another build.
constexpr long kInterface = 6;

struct Object {
    PyObject head;
    KnownCalls* calls;  // null while it is being made
};

KnownCalls* calls_of(PyObject* self) {
    return reinterpret_cast<Object*>(self)->calls;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    PyObject *functions, *failure, *calls, *running, *lock, *under_way, *worlds, *last, *queued,
        *name;
    unsigned long long pad = 0;
    static const char* const names[] = {"functions", "failure",   "calls",  "running",
                                        "lock",      "under_way", "worlds", "last",
                                        "queued",    "name",      "pad",    nullptr};
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "O!OOOOO!O!O!O!UK:KnownCalls", const_cast<char**>(names),
            &PyDict_Type, &functions, &failure, &calls, &running, &lock, &PyList_Type, &under_way,
            &PySet_Type, &worlds, &PyDict_Type, &last, &PyType_Type, &queued, &name, &pad)) {
        return nullptr;
    }
    Reference self = Reference::owned(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* const made = new (std::nothrow) KnownCalls;
    if (made == nullptr) return PyErr_NoMemory();
    reinterpret_cast<Object*>(self.get())->calls = made;
    WorldState& world = made->world;
    world.failure = Reference::shared(failure);
    world.calls = Reference::shared(calls);
    world.running = Reference::shared(running);
    world.acquire = Reference::owned(PyObject_GetAttrString(lock, "acquire"));
    world.release = Reference::owned(PyObject_GetAttrString(lock, "release"));
    world.under_way = Reference::shared(under_way);
    world.worlds = Reference::shared(worlds);
    world.last = Reference::shared(last);
    world.queued = Reference::shared(queued);
    world.name = Reference::shared(name);
    world.pad = mkernel::transport::SignalPad(reinterpret_cast<void*>(pad));
    if (!world.acquire || !world.release || !made->torch.open(functions)) return nullptr;
    world.watchdog = Reference::owned(PyObject_GetAttrString(failure, "_watchdog"));
    if (!world.watchdog) return nullptr;
    if (pad == 0 || !world.pad.valid()) {
        PyErr_Format(PyExc_ValueError, "no signal pad at address %llu; format it first", pad);
        return nullptr;
    }
    return self.release();
}

void destroy(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete calls_of(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const KnownCalls* const calls = calls_of(self);
    return calls == nullptr ? 0 : calls->traverse(visit, arg);
}

int clear(PyObject* self) {
    if (KnownCalls* const calls = calls_of(self)) calls->close();
    return 0;
}

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    if (count != kArguments) {
        PyErr_Format(PyExc_TypeError, "a call has %d arguments, not %zd", kArguments, count);
        return nullptr;
    }
    return calls_of(self)->call(arguments);
}

PyObject* learn(PyObject* self, PyObject* arguments, PyObject* keywords) {
    Py_buffer bytes;
    PyObject *starter, *launches, *key, *allocate, *with, *counter;
    static const char* const names[] = {"signature", "starter",   "launches", "key",
                                        "allocate",  "arguments", "counter",  nullptr};
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "y*OOUOO!O!:learn", const_cast<char**>(names), &bytes, &starter,
            &launches, &key, &allocate, &PyTuple_Type, &with, &PyByteArray_Type, &counter)) {
        return nullptr;
    }
    Signature signature{};
    const bool whole = bytes.len == sizeof(Signature);
    if (whole) std::memcpy(&signature, bytes.buf, sizeof(Signature));
    PyBuffer_Release(&bytes);
    if (!whole) {
        PyErr_SetString(PyExc_ValueError, "signature: not one that `call` returned");
        return nullptr;
    }
    if (PyByteArray_GET_SIZE(counter) != sizeof(std::uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "counter: not of 8 bytes");
        return nullptr;
    }
    KnownCall known;
    if (starter != Py_None) {
        known.starter = static_cast<const MkernelCallStarter*>(
            PyCapsule_GetPointer(starter, MKERNEL_CALL_STARTER));
        if (known.starter == nullptr) return nullptr;
        if (known.starter->start == nullptr || known.starter->alignment == 0) {
            PyErr_SetString(PyExc_ValueError, "starter: no function to start with, or alignment 0");
            return nullptr;
        }
    }
    known.capsule = Reference::shared(starter);
    known.launches = Reference::shared(launches);
    known.key = Reference::shared(key);
    known.allocate = Reference::shared(allocate);
    known.arguments = Reference::shared(with);
    known.counter = Reference::shared(counter);
    calls_of(self)->learn(signature, std::move(known));
    Py_RETURN_NONE;
}

PyObject* forget(PyObject* self, PyObject*) {
    calls_of(self)->forget();
    Py_RETURN_NONE;
}

PyObject* add_buffer(PyObject* self, PyObject* arguments) {
    unsigned long long address = 0, nbytes = 0;
    if (!PyArg_ParseTuple(arguments, "KK:add_buffer", &address, &nbytes)) return nullptr;
    calls_of(self)->add_buffer(address, nbytes);
    Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
    calls_of(self)->close();
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL,
     "call(op, a, b, bias, out, a_scale, b_scale, out_dtype, chunk, use_fast_accum) -> the output; "
     "None: call from Python; bytes: likewise, and the call may be learned under this signature"},
    {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&learn)),
     METH_VARARGS | METH_KEYWORDS,
     "learn(signature, starter, launches, key, allocate, arguments, counter): start such calls by "
     "the capsule `starter` from now on, and count them in the 8 bytes of `counter`, which nobody "
     "resizes; None: from Python"},
    {"forget", &forget, METH_NOARGS, "Forget all calls that were learned."},
    {"add_buffer", &add_buffer, METH_VARARGS,
     "add_buffer(address, nbytes): the world's next buffer of symmetric memory of users"},
    {"close", &close, METH_NOARGS, "The world ends: nothing is known any more."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Calls of a world whose signature it has run before.")},
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_methods, methods},
    {0, nullptr}};

PyType_Spec spec = {"mkernel.backends.runtime._known_calls.KnownCalls", sizeof(Object), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_known_calls",
                          "Calls that a world has run before, started without Python.",
                          -1,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__known_calls() {
    Reference module = Reference::owned(PyModule_Create(&definition));
    const Reference type = Reference::owned(PyType_FromSpec(&spec));
    if (!module || !type || PyModule_AddObjectRef(module.get(), "KnownCalls", type.get()) != 0 ||
        PyModule_AddIntConstant(module.get(), "INTERFACE", kInterface) != 0) {
        return nullptr;
    }
    return module.release();
}
