// The Python module `_calls`. Written against Python's own interface: a call through pybind11 would cost as
// much as everything that a known call does here.
#include <Python.h>
#include <structmember.h>

#include <cstring>
#include <new>

#include "backends/runtime/calls/call_path.hpp"
#include "backends/runtime/calls/op.hpp"

using namespace mkernel::calls;

namespace {

// ---- CallPath ------------------------------------------------------------------------------------------

struct PathObject {
    PyObject head;
    CallPath* path;  // null while it is being made
};

PyTypeObject* path_type = nullptr;  // as long as the process

CallPath* path_in(PyObject* self) {
    return reinterpret_cast<PathObject*>(self)->path;
}

PyObject* make_path(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    PyObject *functions, *failure, *calls, *running, *turns, *lock, *under_way, *worlds, *last,
        *queued, *name;
    unsigned long long pad = 0, record = 0;
    int queues = 0;
    static const char* const names[] = {"functions", "failure",   "calls",  "running", "turns",
                                        "lock",      "under_way", "worlds", "last",    "queued",
                                        "name",      "pad",       "record", "queues",  nullptr};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!OOOOOO!O!O!O!UKKp:CallPath",
                                     const_cast<char**>(names), &PyDict_Type, &functions, &failure,
                                     &calls, &running, &turns, &lock, &PyList_Type, &under_way,
                                     &PySet_Type, &worlds, &PyDict_Type, &last, &PyType_Type,
                                     &queued, &name, &pad, &record, &queues)) {
        return nullptr;
    }
    Reference self = Reference::owned(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* const made = new (std::nothrow) CallPath;
    if (made == nullptr) return PyErr_NoMemory();
    reinterpret_cast<PathObject*>(self.get())->path = made;
    WorldState& world = made->world;
    world.failure = Reference::shared(failure);
    world.calls = Reference::shared(calls);
    world.running = Reference::shared(running);
    world.turns = Reference::shared(turns);
    world.acquire = Reference::owned(PyObject_GetAttrString(lock, "acquire"));
    world.release = Reference::owned(PyObject_GetAttrString(lock, "release"));
    world.under_way = Reference::shared(under_way);
    world.worlds = Reference::shared(worlds);
    world.last = Reference::shared(last);
    world.queued = Reference::shared(queued);
    world.name = Reference::shared(name);
    world.queues = queues != 0;
    world.pad = mkernel::transport::SignalPad(reinterpret_cast<void*>(pad));
    world.record = reinterpret_cast<const mkernel::transport::AbortRecord*>(record);
    if (!world.acquire || !world.release || !made->torch.open(functions)) return nullptr;
    world.watchdog = Reference::owned(PyObject_GetAttrString(failure, "_watchdog"));
    if (!world.watchdog) return nullptr;
    if (pad == 0 || !world.pad.valid()) {
        PyErr_Format(PyExc_ValueError, "no signal pad at address %llu; format it first", pad);
        return nullptr;
    }
    return self.release();
}

void destroy_path(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete path_in(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int traverse_path(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const CallPath* const path = path_in(self);
    return path == nullptr ? 0 : path->traverse(visit, arg);
}

int clear_path(PyObject* self) {
    if (CallPath* const path = path_in(self)) path->close();
    return 0;
}

PyObject* first(PyObject* self, PyObject* prepare) {
    PyObject* const launch = path_in(self)->first(prepare);
    if (launch != nullptr || PyErr_Occurred()) return launch;
    Py_RETURN_NONE;
}

PyObject* learn(PyObject* self, PyObject* arguments, PyObject* keywords) {
    PyObject *capsule, *engine, *program, *starter, *start, *launches, *key, *counter;
    static const char* const names[] = {"signature", "engine", "program", "starter", "start",
                                        "launches",  "key",    "counter", nullptr};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!O!OOOUO!:learn",
                                     const_cast<char**>(names), &capsule, path_type, &engine,
                                     &PyTuple_Type, &program, &starter, &start, &launches, &key,
                                     &PyByteArray_Type, &counter)) {
        return nullptr;
    }
    const auto* signature =
        static_cast<const Signature*>(PyCapsule_GetPointer(capsule, kSignatureCapsule));
    KnownCall known;
    if (signature == nullptr || !known.program.open(program)) return nullptr;
    if (PyByteArray_GET_SIZE(counter) != sizeof(std::uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "counter: not of 8 bytes");
        return nullptr;
    }
    if (starter != Py_None) {
        known.starter = static_cast<const MkernelCallStarter*>(
            PyCapsule_GetPointer(starter, MKERNEL_CALL_STARTER));
        if (known.starter == nullptr) return nullptr;
        if (known.starter->start == nullptr || known.starter->alignment == 0 ||
            known.program.launched.size() > MKERNEL_CALL_TENSORS) {
            PyErr_SetString(PyExc_ValueError,
                            "starter: no function to start with, alignment 0, or too many tensors");
            return nullptr;
        }
    }
    known.engine = Reference::shared(engine);
    known.path = path_in(engine);
    known.capsule = Reference::shared(starter);
    known.start = Reference::shared(start);
    known.launches = Reference::shared(launches);
    known.key = Reference::shared(key);
    known.counter = Reference::shared(counter);
    path_in(self)->learn(*signature, std::move(known));
    Py_RETURN_NONE;
}

PyObject* forget(PyObject* self, PyObject*) {
    path_in(self)->forget();
    Py_RETURN_NONE;
}

PyObject* add_buffer(PyObject* self, PyObject* arguments) {
    unsigned long long address = 0, nbytes = 0;
    if (!PyArg_ParseTuple(arguments, "KK:add_buffer", &address, &nbytes)) return nullptr;
    path_in(self)->add_buffer(address, nbytes);
    Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
    path_in(self)->close();
    Py_RETURN_NONE;
}

PyMethodDef path_methods[] = {
    {"first", &first, METH_O,
     "first(prepare) -> launch: run a call that prepare() -> (key, start, waits) makes ready in "
     "the world's "
     "turn; start(number, epoch, timeout_s, {}) launches it. None: the world has ended"},
    {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&learn)),
     METH_VARARGS | METH_KEYWORDS,
     "learn(signature, engine, program, starter, start, launches, key, counter): run such calls "
     "without Python from now on, on the path `engine`; count them in the 8 bytes of `counter`, "
     "which "
     "nobody resizes. starter: a capsule; None: start(number, epoch, timeout_s, tensors) -> "
     "launch"},
    {"forget", &forget, METH_NOARGS, "Forget all calls that were learned."},
    {"add_buffer", &add_buffer, METH_VARARGS,
     "add_buffer(address, nbytes): the world's next buffer of symmetric memory of users"},
    {"close", &close, METH_NOARGS, "The world ends: nothing is known any more."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot path_slots[] = {
    {Py_tp_doc, const_cast<char*>("The path of one engine's calls in a world.")},
    {Py_tp_new, reinterpret_cast<void*>(&make_path)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&destroy_path)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse_path)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear_path)},
    {Py_tp_methods, path_methods},
    {0, nullptr}};

PyType_Spec path_spec = {"mkernel.backends.runtime._calls.CallPath", sizeof(PathObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, path_slots};

// ---- Op ------------------------------------------------------------------------------------------------

struct OpObject {
    PyObject head;
    vectorcallfunc vectorcall;
    Op* op;
};

Op* op_in(PyObject* self) {
    return reinterpret_cast<OpObject*>(self)->op;
}

PyObject* call_op(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
    return op_in(self)->call(arguments, PyVectorcall_NARGS(flags), names);
}

PyObject* make_op(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    PyObject *name, *parameters, *defaults, *functions, *paths, *python, *profiler, *profiling,
        *named, *rows, *family;
    int group = 0, caller = 0;
    static const char* const names[] = {
        "name",   "parameters", "defaults",  "group", "caller",   "functions", "paths",
        "python", "profiler",   "profiling", "named", "any_rows", "family",    nullptr};
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "UO!O!iiO!O!OO!O!OO!O!:Op", const_cast<char**>(names), &name,
            &PyTuple_Type, &parameters, &PyTuple_Type, &defaults, &group, &caller, &PyDict_Type,
            &functions, &PyDict_Type, &paths, &python, &PyDict_Type, &profiler, &PyDict_Type,
            &profiling, &named, &PyFrozenSet_Type, &rows, &PyFrozenSet_Type, &family)) {
        return nullptr;
    }
    Reference self = Reference::owned(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* const made = new (std::nothrow) Op;
    if (made == nullptr) return PyErr_NoMemory();
    reinterpret_cast<OpObject*>(self.get())->op = made;
    reinterpret_cast<OpObject*>(self.get())->vectorcall = &call_op;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    made->name = Reference::owned(name);
    made->parameters = Reference::shared(parameters);
    made->defaults = Reference::shared(defaults);
    made->group = group;
    made->caller = static_cast<Caller>(caller);
    made->paths = Reference::shared(paths);
    made->python = Reference::shared(python);
    made->profiler = Reference::shared(profiler);
    made->named = Reference::shared(named);
    made->profiling = Reference::shared(profiling);
    for (int each = 0; each < PyTuple_GET_SIZE(parameters); ++each) {
        const Reference number = Reference::owned(PyLong_FromLong(each));
        if (!number) return nullptr;
        for (const auto& [numbers, bits] :
             {std::pair{rows, &made->any_rows}, std::pair{family, &made->family}}) {
            const int found = PySet_Contains(numbers, number.get());
            if (found < 0) return nullptr;
            if (found == 1) *bits |= std::uint64_t{1} << each;
        }
    }
    if (group < 0 || group >= PyTuple_GET_SIZE(parameters)) {
        PyErr_SetString(PyExc_ValueError, "group: not the number of a parameter");
        return nullptr;
    }
    if (!made->torch.open(functions)) return nullptr;
    return self.release();
}

// Ops live as long as the process: torch's registry holds them.
void destroy_op(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    delete op_in(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* records(PyObject* self, PyObject* record) {
    op_in(self)->record = Reference::shared(record);
    Py_RETURN_NONE;
}

PyMethodDef op_methods[] = {
    {"records", &records, METH_O,
     "records(function): call function(*values) where gradients are to be recorded"},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef op_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(OpObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot op_slots[] = {{Py_tp_doc, const_cast<char*>("An op, as one of its callers calls it.")},
                          {Py_tp_new, reinterpret_cast<void*>(&make_op)},
                          {Py_tp_dealloc, reinterpret_cast<void*>(&destroy_op)},
                          {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                          {Py_tp_methods, op_methods},
                          {Py_tp_members, op_members},
                          {0, nullptr}};

PyType_Spec op_spec = {"mkernel.backends.runtime._calls.Op", sizeof(OpObject), 0,
                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, op_slots};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_calls",
                          "The one path of all calls.",
                          -1,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

CallPath* mkernel::calls::path_of(PyObject* object) {
    return path_in(object);
}

PyMODINIT_FUNC PyInit__calls() {
    Reference module = Reference::owned(PyModule_Create(&definition));
    Reference path = Reference::owned(PyType_FromSpec(&path_spec));
    const Reference op = Reference::owned(PyType_FromSpec(&op_spec));
    if (!module || !path || !op ||
        PyModule_AddObjectRef(module.get(), "CallPath", path.get()) != 0 ||
        PyModule_AddObjectRef(module.get(), "Op", op.get()) != 0) {
        return nullptr;
    }
    path_type = reinterpret_cast<PyTypeObject*>(path.release());
    return module.release();
}
