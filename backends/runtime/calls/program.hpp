// The steps of a call around its launch, as Python recorded them when it made the first one: functions of
// torch, called on the caller's tensors and on what earlier steps made (`mkernel/ops/steps.py`).
#pragma once

#include <Python.h>

#include <vector>

#include "backends/runtime/calls/reference.hpp"

namespace mkernel::calls {

struct Step {
    struct Argument {
        int slot;  // -1: the constant
        Reference constant;
    };

    Reference function;
    std::vector<Argument> arguments;
    Reference names;  // of the last arguments, which are passed by keyword; or none
    int result = -1;  // slot; -1: it is dropped

    // Runs the step. Returns false with a Python exception.
    bool run(std::vector<Reference>& slots) const;
};

struct Program {
    int slots = 0;
    std::vector<Step> before, after;
    std::vector<int> launched;  // slots of the launch's tensors
    Reference names;            // of these, in the same order (tuple)
    std::vector<int> found;     // slots of what the launch returns
    Reference found_names;      // likewise
    std::vector<int> written;   // slots of caller's tensors that the call writes to
    Reference result;           // a slot's number, or a tuple or list of such

    // Takes one from a tuple (slots, before, after, launched, names, found, found_names, written, result); a
    // step is (function, arguments, slots of these or -1, names, result). Returns false with an exception.
    bool open(PyObject* recorded);
    // Makes the result that `shape` says. Null with a Python exception.
    static PyObject* build(PyObject* shape, const std::vector<Reference>& slots);

    int traverse(visitproc visit, void* arg) const;
};

}  // namespace mkernel::calls
