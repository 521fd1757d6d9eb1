#include "backends/runtime/calls/call_path.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/transport/clock.hpp"

namespace mkernel::calls {

namespace {

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
    PyObject* popleft = interned("popleft");
    PyObject* looked = interned("looked");
    PyObject* behind = interned("behind_s");
    PyObject* enter = interned("__enter__");
    PyObject* follow = interned("follow");
    PyObject* note = interned("queued");
    PyObject* ended = interned("ended");
    PyObject* results = interned("results");
    PyObject* look = interned("look_if_behind");
    PyObject* broken = interned("raise_if_broken");
    PyObject* recorded = interned("raise_recorded");
    PyObject* failed = interned("count_error");
};

const Names& names() {
    static const Names made;
    return made;
}

Reference attribute(const Reference& object, PyObject* name) {
    return Reference::owned(PyObject_GetAttr(object.get(), name));
}

Reference method(const Reference& object, PyObject* name) {
    PyObject* const arguments[] = {object.get()};
    return Reference::owned(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
}

// The world's turn among all worlds of the process. Where another thread has it Python waits, by a deadline.
// The world may end while this thread waits.
class Turn {
  public:
    explicit Turn(const WorldState& world) : under_way_(world.under_way), release_(world.release) {
        if (!release_) return;
        const Reference turns = world.turns, name = world.name;
        PyObject* const arguments[] = {Py_False};
        const Reference taken =
            Reference::owned(PyObject_Vectorcall(world.acquire.get(), arguments, 1, nullptr));
        if (!taken) return;
        if (taken.get() == Py_True) {
            taken_ = true;
            noted_ = PyList_Append(under_way_.get(), name.get()) == 0;
        } else {
            taken_ = noted_ = static_cast<bool>(method(turns, names().enter));
        }
    }
    ~Turn() {
        if (!taken_) return;
        PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
        PyErr_Fetch(&type, &value, &trace);
        if (noted_) {
            const Py_ssize_t last = PyList_GET_SIZE(under_way_.get()) - 1;
            if (PyList_SetSlice(under_way_.get(), last, last + 1, nullptr) != 0) PyErr_Clear();
        }
        const Reference released = Reference::owned(PyObject_CallNoArgs(release_.get()));
        if (!released) PyErr_WriteUnraisable(release_.get());
        PyErr_Restore(type, value, trace);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Returns false with a Python exception, or where the world had ended before.
    explicit operator bool() const { return noted_; }

  private:
    const Reference under_way_, release_;
    bool taken_ = false, noted_ = false;
};

}  // namespace

void KnownCall::count() const {
    std::uint64_t calls = 0;
    char* const bytes = PyByteArray_AS_STRING(counter.get());
    std::memcpy(&calls, bytes, sizeof(calls));
    ++calls;
    std::memcpy(bytes, &calls, sizeof(calls));
}

void Slots::add_overlaps(Signature& signature) const {
    for (std::size_t i = 0; i < given.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            const TensorView &one = given[i], &other = given[j];
            if (one.address >= other.address + other.nbytes) continue;
            if (other.address >= one.address + one.nbytes) continue;
            signature.add(std::uint64_t{i << 32 | j});
            signature.add(one.address - other.address);
        }
    }
}

Answer CallPath::place(const TensorView& view, Signature& signature) const {
    for (std::size_t number = 0; number < buffers_.size(); ++number) {
        const Buffer& buffer = buffers_[number];
        const std::uint64_t end = view.address + view.nbytes, edge = buffer.address + buffer.nbytes;
        if (end <= buffer.address || view.address >= edge) continue;
        if (view.address < buffer.address || end > edge) return Answer::no;
        signature.add(std::uint64_t{number + 1});
        signature.add(view.address - buffer.address);
    }
    return Answer::yes;
}

std::shared_ptr<const KnownCall> CallPath::find(const Signature& signature) const {
    const auto found = calls_.find(signature);
    return found == calls_.end() ? nullptr : found->second;
}

PyObject* CallPath::run(const KnownCall& known, Slots& slots) {
    Start how;
    how.known = &known;
    how.slots = &slots;
    if (!slots.given.empty()) how.device = slots.given[0].device;
    const std::size_t given = slots.objects.size();
    slots.objects.resize(known.program.slots);
    for (const Step& step : known.program.before) {
        if (!step.run(slots.objects)) return nullptr;
    }
    if (known.starter != nullptr) {
        for (std::size_t i = 0; i < known.program.launched.size(); ++i) {
            const int slot = known.program.launched[i];
            how.tensors[i] = Py_None;
            if (slot < 0) continue;
            how.tensors[i] = slots.objects[slot].get();
            if (static_cast<std::size_t>(slot) < given) {
                how.addresses[i] = slots.given[slot].address;
            } else if (!torch.locate(slots.objects[slot].get(), how.addresses[i])) {
                return nullptr;
            }
            if (how.addresses[i] % known.starter->alignment != 0) return nullptr;
        }
    }
    const Reference launch = known.path->begin(how);
    PyObject* const result = launch ? known.path->finish(known, slots, how, launch) : nullptr;
    if (result == nullptr && PyErr_Occurred()) known.path->count_error();
    return result;
}

void CallPath::count_error() const {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    if (world.calls && !method(world.calls, names().failed)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

PyObject* CallPath::first(PyObject* prepare) {
    Start how;
    how.prepare = prepare;
    return begin(how).release();
}

Reference CallPath::begin(Start& how) {
    const KnownCall* const known = how.known;
    if (known != nullptr && !torch.current_stream(how.device, how.stream)) return {};
    const Turn turn(world);
    if (!turn || closed_) return {};
    const bool several = PySet_GET_SIZE(world.worlds.get()) > 1;
    if (!look_alive(several)) return {};
    Reference key, starts;
    int waits = world.queues ? 0 : 1;
    if (known == nullptr) {
        const Reference prepared = Reference::owned(PyObject_CallNoArgs(how.prepare));
        PyObject *plan, *started;
        if (!prepared || !PyArg_ParseTuple(prepared.get(), "OOp", &plan, &started, &waits))
            return {};
        key = Reference::shared(plan);
        starts = Reference::shared(started);
    } else {
        key = known->key;
        starts = known->start;
    }
    bool in_order = false;
    if (world.queues && !follow(how, several, in_order)) return {};
    const Reference timeout = attribute(world.failure, names().timeout);
    const Reference before = attribute(world.failure, names().call);
    const Reference launched = attribute(world.calls, names().launched);
    if (!timeout || !before || !launched) return {};
    const double timeout_s = PyFloat_AsDouble(timeout.get());
    if (PyErr_Occurred() || !look_if_behind(timeout_s)) return {};
    const std::uint64_t latest = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(before.get(), 0));
    const std::uint64_t number = known == nullptr ? latest : latest + 1;
    const Reference epoch = Reference::owned(
        PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(launched.get()) + 1));
    // Number and key change as one, so that a heartbeat never pairs one call's with another's.
    const Reference now = Reference::owned(Py_BuildValue("(KO)", number, key.get()));
    if (!epoch || !now || PyObject_SetAttr(world.failure.get(), names().call, now.get()) != 0)
        return {};

    Reference launch;
    if (known != nullptr && known->starter != nullptr) {
        MkernelCall call{};
        call.number = number;
        call.epoch = PyLong_AsUnsignedLongLong(epoch.get());
        call.timeout_s = timeout_s;
        call.stream = how.stream;
        call.addresses = how.addresses;
        call.tensors = how.tensors;
        const MkernelCallResult result = known->starter->start(known->starter->self, &call);
        if (result == MKERNEL_CALL_DECLINED) {  // Python makes the call, and says why
            PyObject_SetAttr(world.failure.get(), names().call, before.get());
            return {};
        }
        if (result == MKERNEL_CALL_QUEUED) launch = known->launches;
    } else {
        launch = start(how, starts, number, PyLong_AsUnsignedLongLong(epoch.get()), timeout_s);
    }
    if (!launch) return {};
    if (known != nullptr) known->count();
    // Not where a launch is refused, on all ranks alike.
    if (PyObject_SetAttr(world.calls.get(), names().launched, epoch.get()) != 0) return {};
    if (world.queues && several && !note_queued(in_order)) return {};
    if (!listed(launch)) return {};
    if (waits != 0) {
        PyObject* const arguments[] = {world.calls.get(), launch.get()};
        how.results =
            Reference::owned(PyObject_VectorcallMethod(names().ended, arguments, 2, nullptr));
        if (!how.results) return {};
    }
    return launch;
}

bool CallPath::look_alive(bool several) const {
    const Reference notice = attribute(world.failure, names().notice);
    if (!notice) return false;
    const bool broken = notice.get() != Py_None;
    if (broken && !method(world.failure, names().broken)) return false;
    const bool recorded = world.pad.aborted() != transport::AbortCode::none ||
                          (world.record != nullptr &&
                           transport::abort_code(*world.record) != transport::AbortCode::none);
    // With several worlds the failure may be that of companions, which run other ops of this world.
    if (!several && !broken && !recorded) return true;
    return static_cast<bool>(method(world.failure, names().recorded));
}

// A rank that was stopped must not begin a call of a world that the others have given up, and write into their
// memory: a look of the watchdog that is older than some heartbeats is made again.
bool CallPath::look_if_behind(double timeout_s) const {
    if (world.watchdog.get() == Py_None) return true;
    const Reference looked = attribute(world.watchdog, names().looked);
    const Reference behind = attribute(world.watchdog, names().behind);
    if (!looked || !behind) return false;
    const double limit_s = std::min(PyFloat_AsDouble(behind.get()), timeout_s);
    const double age_s = 1e-9 * transport::monotonic_ns() - PyFloat_AsDouble(looked.get());
    if (PyErr_Occurred()) return false;
    return age_s <= limit_s || static_cast<bool>(method(world.failure, names().look));
}

bool CallPath::follow(const Start& how, bool several, bool& in_order) const {
    if (!several) return true;
    PyObject* const last = PyDict_GetItemWithError(world.last.get(), Py_False);
    if (last == nullptr && PyErr_Occurred()) return false;
    if (how.known != nullptr && last != nullptr) {
        const Answer capturing = torch.capturing();
        if (capturing == Answer::raised) return false;
        if (capturing == Answer::no) {
            const Answer same = torch.is_stream(PyTuple_GET_ITEM(last, 1), how.device, how.stream);
            if (same == Answer::raised) return false;
            in_order = same == Answer::yes;
        }
    }
    return in_order || static_cast<bool>(method(world.turns, names().follow));
}

bool CallPath::note_queued(bool in_order) const {
    if (!in_order) return static_cast<bool>(method(world.turns, names().note));
    PyObject* const last = PyDict_GetItemWithError(world.last.get(), Py_False);
    if (last == nullptr) return !PyErr_Occurred();
    if (PyTuple_GET_ITEM(last, 0) == world.name.get() && PyTuple_GET_ITEM(last, 2) == Py_None) {
        return true;
    }
    const Reference now = Reference::owned(PyObject_CallFunctionObjArgs(
        world.queued.get(), world.name.get(), PyTuple_GET_ITEM(last, 1), Py_None, nullptr));
    return now && PyDict_SetItem(world.last.get(), Py_False, now.get()) == 0;
}

Reference CallPath::start(const Start& how, const Reference& start, std::uint64_t number,
                          std::uint64_t epoch, double timeout_s) const {
    Reference tensors = Reference::owned(PyDict_New());
    if (!tensors) return {};
    if (how.known != nullptr) {
        const Program& program = how.known->program;
        for (std::size_t i = 0; i < program.launched.size(); ++i) {
            PyObject* const name = PyTuple_GET_ITEM(program.names.get(), i);
            PyObject* const tensor = how.slots->objects[program.launched[i]].get();
            if (PyDict_SetItem(tensors.get(), name, tensor) != 0) return {};
        }
    }
    return Reference::owned(
        PyObject_CallFunction(start.get(), "KKdO", number, epoch, timeout_s, tensors.get()));
}

PyObject* CallPath::finish(const KnownCall& known, Slots& slots, const Start& how,
                           const Reference& launch) const {
    const Program& program = known.program;
    Reference results = how.results;
    if (!results && !program.found.empty()) {
        results = method(launch, names().results);
        if (!results) return nullptr;
    }
    for (std::size_t i = 0; i < program.found.size(); ++i) {
        slots.objects[program.found[i]] = Reference::owned(
            PyObject_GetItem(results.get(), PyTuple_GET_ITEM(program.found_names.get(), i)));
        if (!slots.objects[program.found[i]]) return nullptr;
    }
    for (const Step& step : program.after) {
        if (!step.run(slots.objects)) return nullptr;
    }
    if (!program.written
             .empty()) {  // autograd may have saved them for a backward, and must hear of it
        Reference written = Reference::owned(PyTuple_New(program.written.size()));
        if (!written) return nullptr;
        for (std::size_t i = 0; i < program.written.size(); ++i) {
            PyTuple_SET_ITEM(written.get(), i, Py_NewRef(slots.objects[program.written[i]].get()));
        }
        if (!torch.written(written.get())) return nullptr;
    }
    return Program::build(program.result.get(), slots.objects);
}

// `running` is waited for from its left: one entry stands for everything that a backend's starters have started.
bool CallPath::listed(const Reference& launch) const {
    Py_ssize_t count = PySequence_Size(world.running.get());
    if (count > 0) {
        const Reference last = Reference::owned(PySequence_GetItem(world.running.get(), count - 1));
        if (!last) return false;
        if (last.get() == launch.get()) return true;
    }
    for (; count > 0; --count) {  // what has ended goes
        const Reference oldest = Reference::owned(PySequence_GetItem(world.running.get(), 0));
        if (!oldest) return false;
        const Reference over =
            Reference::owned(PyObject_CallMethod(oldest.get(), "wait", "d", 0.0));
        if (!over) return false;
        if (over.get() != Py_True) break;
        if (!method(world.running, names().popleft)) return false;
    }
    PyObject* const arguments[] = {world.running.get(), launch.get()};
    const Reference appended =
        Reference::owned(PyObject_VectorcallMethod(names().append, arguments, 2, nullptr));
    return static_cast<bool>(appended);
}

void CallPath::learn(const Signature& signature, KnownCall call) {
    if (closed_) return;
    if (calls_.size() >= kMost) calls_.clear();
    calls_[signature] = std::make_shared<const KnownCall>(std::move(call));
}

void CallPath::close() {
    closed_ = true;
    calls_.clear();
    world = {};
}

int CallPath::traverse(visitproc visit, void* arg) const {
    for (const Reference* each : {&world.failure, &world.watchdog, &world.calls, &world.running,
                                  &world.turns, &world.acquire, &world.release, &world.under_way,
                                  &world.worlds, &world.last, &world.queued}) {
        Py_VISIT(each->get());
    }
    for (const auto& [signature, known] : calls_) {
        if (known.use_count() > 1) continue;  // a call is running
        for (const Reference* each : {&known->engine, &known->start, &known->launches}) {
            Py_VISIT(each->get());
        }
        const int found = known->program.traverse(visit, arg);
        if (found != 0) return found;
    }
    return 0;
}

}  // namespace mkernel::calls
