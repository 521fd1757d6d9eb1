// An op as Python and torch's dispatcher call it: it binds arguments, signs the call, and runs it on its
// world's path where it is known there.
#pragma once

#include <Python.h>

#include <vector>

#include "backends/runtime/calls/call_path.hpp"
#include "backends/runtime/calls/reference.hpp"

namespace mkernel::calls {

// Who calls.
enum class Caller : int {
    user = 0,      // modes, subclasses and gradients are still to be seen to
    autograd = 1,  // it records the call
    torch = 2,     // its dispatcher, below everything else
    graph =
        3,  // its dispatcher, where it would record the call; a set of keys is the first argument
};

class Op {
  public:
    Reference name;        // interned: an op's callers share what they know by it
    Reference parameters;  // names (tuple)
    Reference defaults;    // of the last of them (tuple)
    int group = 0;         // which parameter names the world
    Caller caller = Caller::user;
    Reference paths;      // dict: CallPath by its world's name, and by None that of the default one
    Reference python;     // python(values, signature, family): makes the call; of a graph's caller
                          // torch's own function, with its arguments
    Reference record;     // record(*values) for gradients; none: through `python`
    Reference profiler;   // dict of the module torch.autograd.profiler
    Reference profiling;  // dict of the module mkernel.world.profiling
    Reference named;      // named(values): makes the call under its name, or NotImplemented
    std::uint64_t any_rows = 0;  // parameters whose number of rows is not signed, a bit each
    std::uint64_t family = 0;    // the same of a family: calls that differ in these rows alone
    TorchView torch;

    PyObject* call(PyObject* const* arguments, std::size_t count, PyObject* names) const;

  private:
    // Fills in arguments by position and name, and defaults. Returns false with a TypeError.
    bool bind(PyObject* const* arguments, std::size_t count, PyObject* names,
              std::vector<PyObject*>& values) const;
    // Returns true where a profiler wants to see the call's name.
    [[nodiscard]] bool is_profiled() const;
    // Signs the call, but for rows of the parameters in `loose`: yes, or no where Python has to look at it.
    Answer sign(const CallPath& path, const std::vector<PyObject*>& values, std::uint64_t loose,
                Signature& signature, Slots& slots, bool& records) const;
    // Returns the signature of the call's family as bytes; None if it has none. Null with an error set.
    Reference family_of(const CallPath& path, const std::vector<PyObject*>& values) const;
    Answer sign_tensor(const CallPath& path, PyObject* tensor, bool grad, bool any_rows,
                       Signature& signature, Slots& slots, bool& records) const;
    PyObject* make(const std::vector<PyObject*>& values, const Signature* signature,
                   const CallPath* path) const;
};

// The name of the capsules in which Python hands a signature back to `CallPath.learn`.
inline constexpr const char* kSignatureCapsule = "mkernel.signature";

// Returns the path that a Python object of its type holds.
CallPath* path_of(PyObject* object);

}  // namespace mkernel::calls
