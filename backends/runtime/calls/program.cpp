#include "backends/runtime/calls/program.hpp"

namespace mkernel::calls {

namespace {

bool numbers(PyObject* tuple, std::vector<int>& into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        into.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i))));
    }
    return PyErr_Occurred() == nullptr;
}

bool steps(PyObject* tuple, std::vector<Step>& into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        PyObject *function, *arguments, *slots, *names;
        Step step;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "OO!O!Oi", &function, &PyTuple_Type,
                              &arguments, &PyTuple_Type, &slots, &names, &step.result)) {
            return false;
        }
        std::vector<int> places;
        if (!numbers(slots, places)) return false;
        for (std::size_t each = 0; each < places.size(); ++each) {
            PyObject* const constant = PyTuple_GET_ITEM(arguments, each);
            step.arguments.push_back(
                {places[each], places[each] < 0 ? Reference::shared(constant) : Reference()});
        }
        step.function = Reference::shared(function);
        if (names != Py_None) step.names = Reference::shared(names);
        into.push_back(std::move(step));
    }
    return true;
}

}  // namespace

bool Step::run(std::vector<Reference>& slots) const {
    std::vector<PyObject*> given;
    given.reserve(arguments.size());
    for (const Argument& each : arguments) {
        given.push_back(each.slot < 0 ? each.constant.get() : slots[each.slot].get());
    }
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names.get()) : 0;
    Reference made = Reference::owned(PyObject_Vectorcall(
        function.get(), given.data(), given.size() - named, names ? names.get() : nullptr));
    if (!made) return false;
    if (result >= 0) slots[result] = std::move(made);
    return true;
}

bool Program::open(PyObject* recorded) {
    PyObject *first, *last, *which, *tensor_names, *returned, *returned_names, *over, *shape;
    PyTypeObject* const tuple = &PyTuple_Type;
    if (!PyArg_ParseTuple(recorded, "iO!O!O!O!O!O!O!O:program", &slots, tuple, &first, tuple, &last,
                          tuple, &which, tuple, &tensor_names, tuple, &returned, tuple,
                          &returned_names, tuple, &over, &shape)) {
        return false;
    }
    names = Reference::shared(tensor_names);
    found_names = Reference::shared(returned_names);
    result = Reference::shared(shape);
    return steps(first, before) && steps(last, after) && numbers(which, launched) &&
           numbers(returned, found) && numbers(over, written);
}

PyObject* Program::build(PyObject* shape, const std::vector<Reference>& slots) {
    if (PyLong_Check(shape)) return Py_NewRef(slots[PyLong_AsLong(shape)].get());
    const bool list = PyList_Check(shape);
    if (!list && !PyTuple_Check(shape)) return Py_NewRef(shape);  // None
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(shape);
    Reference made = Reference::owned(list ? PyList_New(count) : PyTuple_New(count));
    for (Py_ssize_t i = 0; made && i < count; ++i) {
        PyObject* const part = build(PySequence_Fast_GET_ITEM(shape, i), slots);
        if (part == nullptr) return nullptr;
        if (list) {
            PyList_SET_ITEM(made.get(), i, part);
        } else {
            PyTuple_SET_ITEM(made.get(), i, part);
        }
    }
    return made.release();
}

int Program::traverse(visitproc visit, void* arg) const {
    for (const std::vector<Step>* each : {&before, &after}) {
        for (const Step& step : *each) {
            Py_VISIT(step.function.get());
            for (const Step::Argument& argument : step.arguments) Py_VISIT(argument.constant.get());
        }
    }
    return 0;
}

}  // namespace mkernel::calls
