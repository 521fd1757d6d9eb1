// Calls that a world starts without Python, since it has run their signatures before.
//
// The world's own state stays where Python has it (call numbers, the order of worlds, failures): this code
// reads and writes the same objects, so that calls of either kind follow one another. Every case that is not
// certain here is left to Python, which decides and raises: `call` then returns None, and has done nothing.
// It runs with the GIL and in the world's turn.
//
// An entry may be used only while its call needs no agreement and no new memory. All entries are therefore
// dropped whenever the world forgets shapes (`forget`), on all ranks at the same call.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "backends/contracts/call_starter.h"
#include "backends/runtime/known/reference.hpp"
#include "backends/runtime/known/signature.hpp"
#include "backends/runtime/known/torch_view.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::known {

// The world's objects, as `World` and its parts have them.
struct WorldState {
    Reference failure;           // FailureMonitor: call, notice, timeout_s, _recorded
    Reference watchdog;          // its Watchdog: looked, behind_s; None: nobody watches
    Reference calls;             // Calls: _launched
    Reference running;           // deque of launches
    Reference acquire, release;  // of the lock of the device's order
    Reference under_way;         // list of worlds whose calls are being made
    Reference worlds;            // set of those that the device has
    Reference last;              // dict: by whether it was captured, the last call's Queued
    Reference queued;            // that type: (world, stream, event or None)
    Reference name;
    transport::SignalPad pad;
};

constexpr int kArguments = 10;  // of `KnownCalls::call`

struct KnownCall {
    Reference capsule;                            // keeps `starter`
    const MkernelCallStarter* starter = nullptr;  // null: such calls go through Python
    Reference launches;                           // what to wait on for calls that it started
    Reference key;                                // of the agreement
    Reference allocate, arguments;                // make the output
    Reference counter;                            // bytearray with the number of its calls

    void count() const {
        std::uint64_t calls = 0;
        char* const bytes = PyByteArray_AS_STRING(counter.get());
        std::memcpy(&calls, bytes, sizeof(calls));
        ++calls;
        std::memcpy(bytes, &calls, sizeof(calls));
    }
};

class KnownCalls {
  public:
    // The most calls kept, after which all are forgotten. More than a world has shapes.
    static constexpr std::size_t kMost = 4096;

    TorchView torch;
    WorldState world;

    // Starts a call. `arguments`: op, a, b, bias, out, a_scale, b_scale, out_dtype, chunk, each but the first
    // three perhaps None, and whether products may be added with fewer bits (bool). Returns the output; None:
    // make the call from Python; bytes: make it from Python, after which `learn` may be called with this
    // signature. Null with a Python exception.
    PyObject* call(PyObject* const* arguments);

    void learn(const Signature& signature, KnownCall call);
    void forget() { calls_.clear(); }
    // Leaves every later call to Python, and drops the references into the world.
    void close() {
        closed_ = true;
        calls_.clear();
        world = {};
    }
    // Adds a user's memory that all ranks have at one place; the n-th is buffer n of the world.
    void add_buffer(std::uint64_t address, std::uint64_t nbytes) {
        buffers_.push_back({address, nbytes});
    }

    int traverse(visitproc visit, void* arg) const;

  private:
    struct Buffer {
        std::uint64_t address, nbytes;
    };
    struct Tensors {
        PyObject* objects[kMostTensors];
        std::uint64_t addresses[kMostTensors];
    };

    Answer sign(PyObject* const* arguments, Signature& signature, Tensors& tensors) const;
    bool place(TensorSignature& tensor, std::uint64_t address, std::uint64_t nbytes) const;
    // Queues the call and counts it. Called in the world's turn.
    Answer start(const KnownCall& known, const Signature& signature, const Tensors& tensors);
    // Returns yes where other ranks may have given the world up unheard: `Watchdog.is_behind`.
    Answer is_behind(double timeout_s) const;
    bool listed(const KnownCall& known) const;
    // Returns yes where the call follows those of other worlds by being queued on the stream of the last one.
    Answer follows(const TensorSignature& tensor, std::uint64_t stream) const;
    // Notes that this call is the last one from now on. Returns false with a Python exception.
    bool note_last() const;

    bool closed_ = false;
    std::unordered_map<Signature, KnownCall, SignatureHash> calls_;
    std::vector<Buffer> buffers_;
};

}  // namespace mkernel::known
