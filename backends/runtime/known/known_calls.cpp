#include "backends/runtime/known/known_calls.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/transport/clock.hpp"

namespace mkernel::known {

namespace {

// Positions in `arguments`; tensors of a Signature in the same order.
enum : int { kOp, kA, kB, kBias, kOut, kAScale, kBScale, kOutDtype, kChunk, kFastAccum };
constexpr int kNeeded = 2;  // tensors that every call has
constexpr int kOutput = kOut - kA;
static_assert(kFastAccum + 1 == kArguments && kBScale - kA + 1 == kMostTensors);

PyObject* interned(const char* text) {
    return PyUnicode_InternFromString(text);
}

// Names of attributes, made once a process.
struct Names {
    PyObject* call = interned("call");
    PyObject* notice = interned("notice");
    PyObject* timeout = interned("timeout_s");
    PyObject* launched = interned("_launched");
    PyObject* append = interned("append");
    PyObject* recorded = interned("_recorded");
    PyObject* looked = interned("looked");
    PyObject* behind = interned("behind_s");
};

const Names& names() {
    static const Names made;
    return made;
}

Reference attribute(const Reference& object, PyObject* name) {
    return Reference::owned(PyObject_GetAttr(object.get(), name));
}

PyObject* from_python() {
    Py_RETURN_NONE;
}

// The world's turn among all worlds of the process, where no other thread has it.
class Turn {
  public:
    explicit Turn(const WorldState& world) : world_(world) {
        PyObject* const arguments[] = {Py_False};
        const Reference taken =
            Reference::owned(PyObject_Vectorcall(world.acquire.get(), arguments, 1, nullptr));
        taken_ = taken && taken.get() == Py_True;
        if (taken_) noted_ = PyList_Append(world.under_way.get(), world.name.get()) == 0;
    }
    ~Turn() {
        if (!taken_) return;
        PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
        PyErr_Fetch(&type, &value, &trace);
        if (noted_) {
            const Py_ssize_t last = PyList_GET_SIZE(world_.under_way.get()) - 1;
            if (PyList_SetSlice(world_.under_way.get(), last, last + 1, nullptr) != 0)
                PyErr_Clear();
        }
        const Reference released = Reference::owned(PyObject_CallNoArgs(world_.release.get()));
        if (!released) PyErr_WriteUnraisable(world_.release.get());
        PyErr_Restore(type, value, trace);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Returns false, without an exception or with one: another thread has the turn, or Python failed.
    explicit operator bool() const { return noted_; }

  private:
    const WorldState& world_;
    bool taken_ = false, noted_ = false;
};

}  // namespace

bool KnownCalls::place(TensorSignature& tensor, std::uint64_t address, std::uint64_t nbytes) const {
    for (std::size_t number = 0; number < buffers_.size(); ++number) {
        const Buffer& buffer = buffers_[number];
        if (address + nbytes <= buffer.address || address >= buffer.address + buffer.nbytes)
            continue;
        if (address < buffer.address || address + nbytes > buffer.address + buffer.nbytes)
            return false;
        tensor.buffer = static_cast<std::int64_t>(number) + 1;
        tensor.offset = static_cast<std::int64_t>(address - buffer.address);
    }
    return true;
}

Answer KnownCalls::sign(PyObject* const* arguments, Signature& signature, Tensors& tensors) const {
    Py_ssize_t length = 0;
    const char* const op = PyUnicode_AsUTF8AndSize(arguments[kOp], &length);
    if (op == nullptr) return Answer::raised;
    if (static_cast<std::size_t>(length) >= kMostNameBytes) return Answer::no;
    std::memcpy(signature.op, op, length);
    if (arguments[kOutDtype] != Py_None) {
        signature.out_dtype = reinterpret_cast<std::uintptr_t>(arguments[kOutDtype]);
    }
    signature.use_fast_accum = arguments[kFastAccum] == Py_True ? 1 : 0;
    const Answer recorded = torch.records();
    if (recorded == Answer::raised) return Answer::raised;
    std::uint64_t ends[kMostTensors] = {};  // 0 where there is no tensor
    for (int i = 0; i < kMostTensors; ++i) {
        PyObject* const tensor = tensors.objects[i] = arguments[kA + i];
        if (i >= kNeeded && tensor == Py_None) continue;
        std::uint64_t nbytes = 0;
        TensorSignature& own = signature.tensors[i];
        const Answer read =
            torch.read(tensor, recorded == Answer::yes, own, tensors.addresses[i], nbytes);
        if (read != Answer::yes) return read;
        if (!place(own, tensors.addresses[i], nbytes)) return Answer::no;
        ends[i] = tensors.addresses[i] + nbytes;
    }
    for (int i = 0; i < kMostTensors; ++i) {  // an output over an input: Python says what is wrong
        const bool meet =
            tensors.addresses[i] < ends[kOutput] && tensors.addresses[kOutput] < ends[i];
        if (i != kOutput && meet) return Answer::no;
    }
    return torch.is_current({signature.tensors[0].device_type, signature.tensors[0].device});
}

PyObject* KnownCalls::call(PyObject* const* arguments) {
    if (closed_ || arguments[kChunk] != Py_None) return from_python();
    const Answer quiet = torch.quiet();
    if (quiet == Answer::raised) return nullptr;
    if (quiet == Answer::no) return from_python();
    Signature signature{};
    Tensors tensors{};
    const Answer signed_ = sign(arguments, signature, tensors);
    if (signed_ == Answer::raised) return nullptr;
    if (signed_ == Answer::no) return from_python();
    const auto found = calls_.find(signature);
    if (found == calls_.end()) {
        return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&signature),
                                         sizeof(Signature));
    }
    const KnownCall known = found->second;  // a copy: Python may run meanwhile, and forget it
    if (known.starter == nullptr) return from_python();

    Reference out = Reference::shared(arguments[kOut]);
    if (arguments[kOut] == Py_None) {
        out = Reference::owned(PyObject_CallObject(known.allocate.get(), known.arguments.get()));
        if (!out) return nullptr;
        TensorSignature made{};
        std::uint64_t nbytes = 0;
        const Answer read = torch.read(out.get(), false, made, tensors.addresses[kOutput], nbytes);
        if (read == Answer::raised) return nullptr;
        if (read == Answer::no) return from_python();
        tensors.objects[kOutput] = out.get();
    }
    for (const std::uint64_t address : tensors.addresses) {
        if (address % known.starter->alignment != 0) return from_python();
    }
    const Answer started = start(known, signature, tensors);
    if (started == Answer::raised) return nullptr;
    if (started == Answer::no) return from_python();
    if (arguments[kOut] != Py_None && !torch.written(out.get())) return nullptr;
    return out.release();
}

Answer KnownCalls::start(const KnownCall& known, const Signature& signature,
                         const Tensors& tensors) {
    std::uint64_t stream = 0;
    if (!torch.current_stream(signature.tensors[0], stream)) return Answer::raised;
    const Turn turn(world);
    if (!turn) return PyErr_Occurred() ? Answer::raised : Answer::no;
    const bool several = PySet_GET_SIZE(world.worlds.get()) > 1;
    if (several) {
        const Answer follow = follows(signature.tensors[0], stream);
        if (follow != Answer::yes) return follow;
        // The failure may also be that of companions, which run other ops of this world; the own pad is read
        // below.
        PyObject* const monitor = world.failure.get();
        const Reference recorded =
            Reference::owned(PyObject_VectorcallMethod(names().recorded, &monitor, 1, nullptr));
        if (!recorded) return Answer::raised;
        if (recorded.get() != Py_None) return Answer::no;
    }
    if (world.pad.aborted() != transport::AbortCode::none) return Answer::no;
    const Reference notice = attribute(world.failure, names().notice);
    const Reference before = attribute(world.failure, names().call);
    const Reference timeout = attribute(world.failure, names().timeout);
    const Reference launched = attribute(world.calls, names().launched);
    if (!notice || !before || !timeout || !launched) return Answer::raised;
    if (notice.get() != Py_None) return Answer::no;
    const double timeout_s = PyFloat_AsDouble(timeout.get());
    const Answer behind = is_behind(timeout_s);
    if (behind != Answer::no) return behind == Answer::yes ? Answer::no : Answer::raised;
    if (!PyTuple_CheckExact(before.get()) || PyTuple_GET_SIZE(before.get()) != 2) return Answer::no;

    MkernelCall call{};
    call.number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(before.get(), 0)) + 1;
    call.epoch = PyLong_AsUnsignedLongLong(launched.get()) + 1;
    call.timeout_s = timeout_s;
    call.stream = stream;
    call.addresses = tensors.addresses;
    call.tensors = reinterpret_cast<void* const*>(tensors.objects);
    if (PyErr_Occurred()) return Answer::raised;
    // Number and key change as one, so that a heartbeat never pairs one call's with another's.
    const Reference now = Reference::owned(Py_BuildValue("(KO)", call.number, known.key.get()));
    const Reference epoch = Reference::owned(PyLong_FromUnsignedLongLong(call.epoch));
    if (!now || !epoch || PyObject_SetAttr(world.failure.get(), names().call, now.get()) != 0) {
        return Answer::raised;
    }
    const MkernelCallResult result = known.starter->start(known.starter->self, &call);
    if (result == MKERNEL_CALL_DECLINED) {
        const int undone = PyObject_SetAttr(world.failure.get(), names().call, before.get());
        return undone == 0 ? Answer::no : Answer::raised;
    }
    if (result != MKERNEL_CALL_QUEUED) return Answer::raised;
    known.count();
    const bool counted = PyObject_SetAttr(world.calls.get(), names().launched, epoch.get()) == 0 &&
                         listed(known) && (!several || note_last());
    return counted ? Answer::yes : Answer::raised;
}

Answer KnownCalls::is_behind(double timeout_s) const {
    if (world.watchdog.get() == Py_None) return Answer::no;
    const Reference looked = attribute(world.watchdog, names().looked);
    const Reference behind = attribute(world.watchdog, names().behind);
    if (!looked || !behind) return Answer::raised;
    const double limit_s = std::min(PyFloat_AsDouble(behind.get()), timeout_s);
    const double age_s = 1e-9 * transport::monotonic_ns() - PyFloat_AsDouble(looked.get());
    if (PyErr_Occurred()) return Answer::raised;
    return age_s > limit_s ? Answer::yes : Answer::no;
}

Answer KnownCalls::follows(const TensorSignature& tensor, std::uint64_t stream) const {
    const Answer capturing = torch.capturing();
    if (capturing != Answer::no) return capturing == Answer::yes ? Answer::no : Answer::raised;
    PyObject* const last = PyDict_GetItemWithError(world.last.get(), Py_False);
    if (last == nullptr) return PyErr_Occurred() ? Answer::raised : Answer::no;
    return torch.is_stream(PyTuple_GET_ITEM(last, 1), tensor, stream);
}

bool KnownCalls::note_last() const {
    PyObject* const last = PyDict_GetItemWithError(world.last.get(), Py_False);
    if (last == nullptr) return !PyErr_Occurred();
    if (PyTuple_GET_ITEM(last, 0) == world.name.get() && PyTuple_GET_ITEM(last, 2) == Py_None) {
        return true;
    }
    const Reference now = Reference::owned(PyObject_CallFunctionObjArgs(
        world.queued.get(), world.name.get(), PyTuple_GET_ITEM(last, 1), Py_None, nullptr));
    return now && PyDict_SetItem(world.last.get(), Py_False, now.get()) == 0;
}

// `running` is waited for from its left: one entry stands for everything that a backend has started here.
bool KnownCalls::listed(const KnownCall& known) const {
    const Py_ssize_t count = PySequence_Size(world.running.get());
    if (count > 0) {
        const Reference last = Reference::owned(PySequence_GetItem(world.running.get(), count - 1));
        if (!last) return false;
        if (last.get() == known.launches.get()) return true;
    }
    PyObject* const arguments[] = {world.running.get(), known.launches.get()};
    const Reference appended =
        Reference::owned(PyObject_VectorcallMethod(names().append, arguments, 2, nullptr));
    return static_cast<bool>(appended);
}

void KnownCalls::learn(const Signature& signature, KnownCall call) {
    if (closed_) return;
    if (calls_.size() >= kMost) calls_.clear();
    calls_[signature] = std::move(call);
}

int KnownCalls::traverse(visitproc visit, void* arg) const {
    for (const Reference* each :
         {&world.failure, &world.watchdog, &world.calls, &world.running, &world.acquire,
          &world.release, &world.under_way, &world.worlds, &world.last, &world.queued}) {
        Py_VISIT(each->get());
    }
    for (const auto& [signature, known] : calls_) {
        for (const Reference* each : {&known.launches, &known.allocate, &known.arguments}) {
            Py_VISIT(each->get());
        }
    }
    return 0;
}

}  // namespace mkernel::known
